"""`moeflow compare`: equal runs, and where others part."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from moeflow.train.checkpoint import CheckpointStore
from tests.cli.run_folders import make_run
from tests.train.runs import TINY
from tests.train.runs import moeflow as command

ROWS = [
    {"step": 1, "loss": 2.5, "lr": 1e-3, "samples_per_s": 10.0},
    {"step": 2, "loss": 2.25, "lr": 1e-3, "samples_per_s": 11.0},
    {"step": 2, "eval/accuracy": 0.5, "eval_s": 0.1},
    {"step": 3, "loss": 2.0, "lr": 1e-3, "samples_per_s": 12.0},
]


def changed(step: int, **values) -> list[dict]:
    return [{**row, **values} if row["step"] == step and "loss" in row else row for row in ROWS]


def save(run, step: int, tensors: dict[str, torch.Tensor]) -> None:
    store = CheckpointStore(run.checkpoints)
    store.save(step, tensors, {}, {"metrics": {}, "layout": {}})
    store.close()


def test_equal_apart_from_wall_clock(moeflow, tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", ROWS)
    slower = [{**row, "samples_per_s": 3.0} if "loss" in row else {**row, "eval_s": 9.0} for row in ROWS]
    b = make_run(tmp_path / "b", slower)
    code, out, _ = moeflow("compare", str(a.path), str(b.path))
    assert code == 0
    assert "metrics        equal in 3 steps that both logged" in out
    assert "configuration  the same" in out
    assert "verdict  bit-equal" in out
    assert out.splitlines()[-1] == "next     moeflow ls"


@pytest.mark.parametrize("torch_there", [True, False])
def test_the_first_step_that_differs_and_by_how_much(moeflow, tmp_path, monkeypatch, torch_there) -> None:
    if not torch_there:
        monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    a = make_run(tmp_path / "a", ROWS, optim__lr=1e-3)
    rows = changed(2, loss=2.25 + 2**-20)
    rows[-1] = {**rows[-1], "loss": 1.0}
    b = make_run(tmp_path / "b", rows, optim__lr=2e-3)
    code, out, _ = moeflow("compare", str(a.path), str(b.path))
    assert code == 1
    assert "  optim.lr: 0.001 -> 0.002" in out
    assert "metrics        2 of 3 steps that both logged differ, first step 2:" in out
    assert "  loss: 2.25 | 2.2500009536743164  (9.54e-07 apart)" in out
    assert "    step 3: loss: 2.0 | 1.0  (1 apart)" in out
    assert "verdict  different from step 2 on" in out


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (ROWS[:3], "equal in the 2 steps that both logged; one of them logged more"),
        (changed(3, loss="NaN"), "different from step 3 on"),
        (changed(1, extra=1.0), "different from step 1 on"),
        (changed(1, lr=-0.0), "different from step 1 on"),
        ([{"step": 9, "loss": 1.0}], "no step was logged by both"),
    ],
)
def test_other_ways_to_differ(moeflow, tmp_path: Path, rows: list[dict], expected: str) -> None:
    a, b = make_run(tmp_path / "a", ROWS), make_run(tmp_path / "b", rows)
    for pair in ((a, b), (b, a)):
        code, out, _ = moeflow("compare", *(str(run.path) for run in pair))
        assert code == 1
        assert expected in out


def test_nan_is_equal_to_nan_and_zero_is_not_minus_zero(moeflow, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, changed(2, loss="NaN", lr=0.0)) for name in "ab"]
    assert moeflow("compare", *(str(run.path) for run in runs))[0] == 0
    other = make_run(tmp_path / "c", changed(2, loss="NaN", lr=-0.0))
    assert moeflow("compare", str(runs[0].path), str(other.path))[0] == 1


def test_checkpoints_by_checksum_then_by_value(moeflow, tmp_path: Path) -> None:
    a, b, c = (make_run(tmp_path / name, ROWS) for name in "abc")
    tensors = {"model/w": torch.arange(6.0).view(2, 3), "model/b": torch.zeros(2), "optimizer/s": torch.ones(3)}
    save(a, 2, tensors)
    save(b, 2, {name: tensor.clone() for name, tensor in tensors.items()})
    code, out, _ = moeflow("compare", str(a.path), str(b.path))
    assert code == 0
    assert "step 2: tensors equal, by their checksums" in out
    other = {
        **tensors,
        "model/w": tensors["model/w"] + torch.tensor([0.0, 0.0, 0.5]),
        "model/b": torch.tensor([0.0, -0.0]),
    }
    save(c, 2, other)
    code, out, _ = moeflow("compare", str(a.path), str(c.path))
    assert code == 1
    assert "step 2: 2 of 3 tensors differ" in out
    assert "  model/w: up to 0.5" in out
    assert "  model/b: up to 0" in out, "bits count"
    assert "verdict  different: their checkpoints differ" in out
    assert moeflow("compare", "--no-tensors", str(a.path), str(c.path))[0] == 0
    found = json.loads(moeflow("compare", "--json", str(a.path), str(c.path))[1])
    assert found["equal"] is False
    assert found["checkpoints"][0]["tensors"]["differing"] == {"model/w": 0.5, "model/b": 0.0}


def test_other_names_and_shapes(moeflow, tmp_path: Path) -> None:
    a, b = (make_run(tmp_path / name, ROWS) for name in "ab")
    save(a, 2, {"model/w": torch.zeros(2), "model/x": torch.zeros(2)})
    save(b, 2, {"model/w": torch.zeros(3), "model/y": torch.zeros(2)})
    code, out, _ = moeflow("compare", "--step", "2", str(a.path), str(b.path))
    assert code == 1
    assert "model/w: another shape or dtype" in out
    assert "only in A: model/x" in out
    assert "only in B: model/y" in out


def test_mistakes(moeflow, tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a", ROWS), make_run(tmp_path / "b")
    assert "takes two run folders, not 1" in moeflow("compare", str(a.path))[2]
    assert "has no metrics yet" in moeflow("compare", str(a.path), str(b.path))[2]
    assert "nothing to compare" in moeflow("compare", str(b.path), str(b.path))[2]
    assert "no checkpoint of step 7" in moeflow("compare", "--step", "7", str(a.path), str(a.path))[2]


@pytest.mark.timeout(150)
def test_a_real_run_stopped_and_resumed(tmp_path: Path) -> None:
    """A run in two parts is equal to one in one go."""
    words = ("train", "+recipe=cifar_tutorial_moe", *TINY, "trainer.max_steps=4", "checkpoint.every=2",
             "launch.processes=1", "parallel.ep=1")  # fmt: skip
    whole, parts = (str(tmp_path / name) for name in ("whole", "parts"))
    command(*words, f"run.dir={whole}")
    command(*words, f"run.dir={parts}", "trainer.stop_at=2")
    command("resume", parts, "trainer.stop_at=null")
    same = command("compare", whole, parts)
    assert "configuration  the same" in same.stdout
    assert same.stdout.count("tensors equal, by their checksums") == 2
    assert "verdict  bit-equal" in same.stdout
