"""`moeflow train` up to the training itself: what is written, when nothing is, and how a run ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from moeflow.config import compose, load
from moeflow.errors import LaunchError
from moeflow.train import rundir


def status(run_dir: Path) -> str:
    return rundir.open(run_dir).status()["state"]


def test_a_run_leaves_a_complete_folder(training, moeflow, tmp_path: Path) -> None:
    words = ["+recipe=cifar_moe", "gate=switch", "optim.lr=3e-4", "data.root=here"]
    assert moeflow("train", *words)[0] == 0
    (call,) = training.calls
    config, run_dir, resume = call
    assert run_dir.parent == tmp_path / "outputs" / "cifar_moe"
    assert not resume
    frozen = load(run_dir / "config.yaml")
    assert frozen == config
    # Complete, with absolute paths, and nothing else than what was composed.
    assert (frozen.run.dir, frozen.run.root) == (str(run_dir), str(tmp_path / "outputs"))
    assert (frozen.run.name, frozen.run.recipe, frozen.data.root) == ("cifar_moe", "cifar_moe", str(tmp_path / "here"))
    composed = compose(words)
    assert (frozen.model, frozen.gate, frozen.optim, frozen.trainer) == (
        composed.model,
        composed.gate,
        composed.optim,
        composed.trainer,
    )
    assert yaml.safe_load((run_dir / "overrides.yaml").read_text()) == words
    diff = yaml.safe_load((run_dir / "recipe_diff.yaml").read_text())
    assert diff["optim.lr"]["run"] == 3e-4
    assert diff["gate.name"] == {"recipe": compose(["+recipe=cifar_moe"]).gate.name, "run": "switch"}
    assert "trainer.max_steps" not in diff
    environment = json.loads((run_dir / "env.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (run_dir / "command.txt").read_text().splitlines()[-1] == "moeflow train +recipe=cifar_moe"
    assert status(run_dir) == "finished"


def test_without_a_recipe(training, moeflow, tmp_path: Path) -> None:
    assert moeflow("train", "model=lenet")[0] == 0
    assert training.run_dir.parent == tmp_path / "outputs" / "custom"
    assert yaml.safe_load((training.run_dir / "recipe_diff.yaml").read_text())["model.name"]["run"] == "lenet"


def test_what_writes_nothing(training, moeflow, tmp_path: Path) -> None:
    code, out, err = moeflow(
        "train", "+recipe=cifar_moe", "gate=switch", "launch.processes=2", "parallel.ep=2", "--dry-run"
    )
    assert code == 0
    assert "2 processes = pp 1 x dp 2 x tp 1; experts: edp 1 x ep 2 x etp 1" in out
    assert "parallel.ep: 1 -> 2" in out
    code, out, err = moeflow("train", "+recipe=cifar_moe", "run.name=${gate.name}", "--cfg", "job")
    assert yaml.safe_load(out)["run"]["name"] == "${gate.name}"
    out = moeflow("train", "+recipe=cifar_moe", "run.name=x-${gate.name}", "--cfg", "job", "--resolve")[1]
    assert yaml.safe_load(out)["run"]["name"].startswith("x-")
    assert moeflow("check", "+recipe=cifar_moe")[0] == 0
    for bad in ("gate=swich", "optim.lrr=1", "launch.processes=3", "run.dir=/proc/nowhere/x"):
        code, out, err = moeflow("train", "+recipe=cifar_moe", bad)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
    assert not training.calls
    assert not list(tmp_path.iterdir())


def test_a_used_folder_is_refused(training, moeflow, tmp_path: Path) -> None:
    assert moeflow("train", "+recipe=cifar_moe", "run.dir=here")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()}
    code, _, err = moeflow("train", "+recipe=cifar_moe", "run.dir=here")
    assert code == 2
    assert f"moeflow resume {tmp_path / 'here'}" in err
    assert {path: path.read_bytes() for path in (tmp_path / "here").rglob("*") if path.is_file()} == before
    assert len(training.calls) == 1


@pytest.mark.parametrize(
    ("result", "code", "state"),
    [
        (0, 0, "finished"),
        (130, 130, "interrupted"),
        (143, 143, "interrupted"),
        (3, 3, "failed"),
        (LaunchError("no device", "buy one"), 2, "failed"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_how_a_run_ended_is_kept(training, moeflow, result: int | BaseException, code: int, state: str) -> None:
    training.result = result
    assert moeflow("train", "+recipe=cifar_moe")[0] == code
    assert status(training.run_dir) == state


def test_a_run_that_stopped_early_is_not_finished(training, moeflow) -> None:
    training.summary = {"status": "interrupted"}
    assert moeflow("train", "+recipe=cifar_moe", "trainer.stop_at=5")[0] == 0
    assert status(training.run_dir) == "interrupted"


def test_a_defect_in_training_is_not_hidden(training, moeflow) -> None:
    training.result = ZeroDivisionError("defect")
    with pytest.raises(ZeroDivisionError):
        moeflow("train", "+recipe=cifar_moe")
    assert status(training.run_dir) == "failed"


# --- resume=auto -----------------------------------------------------------------------------------------------------

AUTO = ("train", "+recipe=cifar_moe", "resume=auto")


def test_auto_starts_anew_and_goes_on_where_steps_are_left(training, moeflow) -> None:
    assert moeflow(*AUTO, "trainer.stop_at=10")[0] == 0
    first = training.run_dir
    assert not training.calls[0][2]
    code, _, err = moeflow(*AUTO)
    assert code == 0
    assert training.run_dir == first
    assert training.calls[1][2]
    assert training.calls[1][0].trainer.stop_at is None
    assert "trainer.stop_at: 10 -> null" in err
    assert load(first / "config.1.yaml").trainer.stop_at == 10
    # Now it is done: the same command starts another run, more steps go on with this one.
    moeflow(*AUTO)
    assert training.run_dir != first
    moeflow(*AUTO, "trainer.max_steps=100000")
    assert training.run_dir != first
    assert training.calls[3][2]


def test_auto_passes_over_runs_that_do_not_fit(training, moeflow) -> None:
    moeflow(*AUTO, "trainer.stop_at=10")
    first = training.run_dir
    code, _, err = moeflow(*AUTO, "gate=switch", "trainer.stop_at=10")
    second = training.run_dir
    assert (code, second != first) == (0, True)
    assert "passes over" in err
    training.saves = False
    moeflow("train", "+recipe=cifar_moe", "trainer.stop_at=3")
    training.saves = True
    # The newest has no checkpoint, the second another gate: the first is what this command means.
    moeflow(*AUTO)
    assert training.run_dir == first
    with rundir.open(second).lock():
        moeflow(*AUTO, "gate=switch")
        assert training.run_dir not in (first, second)


def test_two_autos_at_once_take_two_runs(training, moeflow, monkeypatch) -> None:
    moeflow(*AUTO, "trainer.stop_at=10")
    first = training.run_dir
    with rundir.open(first).lock():
        # The other one took it after this one had looked.
        monkeypatch.setattr(rundir.RunDir, "in_use", lambda run: False)
        code, _, err = moeflow(*AUTO)
    assert (code, training.run_dir != first) == (0, True)
    assert "it is running" in err


def test_auto_with_a_named_folder(training, moeflow, tmp_path: Path) -> None:
    moeflow(*AUTO, "run.dir=here", "trainer.stop_at=10")
    code, _, err = moeflow(*AUTO, "run.dir=here")
    assert code == 0, err
    assert training.run_dir == tmp_path / "here"
    assert training.calls[1][2]
    # What does not fit there is not silently trained elsewhere.
    code, _, err = moeflow(*AUTO, "run.dir=here", "gate=switch")
    assert code == 2
    assert "holds a run already" in err


# --- inside a launcher -----------------------------------------------------------------------------------------------


def test_rank_0_composes_and_the_folder_states_the_launchers_world(training, moeflow, monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert moeflow("train", "+recipe=cifar_moe", "parallel.ep=2")[0] == 0
    frozen = load(training.run_dir / "config.yaml")
    assert (frozen.launch.processes, frozen.parallel.ep) == (2, 2)
    assert status(training.run_dir) == "finished"
    code, _, err = moeflow("train", "--multirun", "gate=naive,switch")
    assert code == 2
    assert "torchrun" in err


def test_errors_of_rank_0_are_told_once(training, moeflow, monkeypatch, tmp_path: Path) -> None:
    for rank, told in (("0", True), ("1", False)):
        for name, value in {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        code, _, err = moeflow("train", "+recipe=cifar_moe", "parallel.pp=3", "--local_rank=0")
        assert code == 2
        assert ("launcher started 2" in err) == told
    assert not list(tmp_path.iterdir())
