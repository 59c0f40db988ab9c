"""experts.jsonl: which steps have a row, what a kill and a resume leave, and that each layout records the same."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from moeflow.errors import MoeflowError
from moeflow.train.expert_log import EXPERTS, ExpertLog, LayerLoad, full_rows, is_kept
from moeflow.train.metrics import read_rows
from tests.train.layouts import PLACES, run


def loads(step: int, experts: int = 4) -> dict[str, LayerLoad]:
    return {"blocks.0.moe": LayerLoad([step] * experts, step % 3, 0.5), "blocks.1.moe": LayerLoad([0] * experts, 0)}


def write(folder, first: int, last: int, resume_step: int | None = None, every: int = 1, experts: int = 4) -> None:
    log = ExpertLog(folder, every, resume_step)
    for step in range(first, last + 1):
        if step % every == 0 or step == 1:
            log.log(step, loads(step, experts))
    log.close()


def steps(folder) -> list[int]:
    return [row["step"] for row in read_rows(folder / EXPERTS)]


def test_a_row_holds_what_was_given(tmp_path):
    write(tmp_path, 7, 7)
    (row,) = read_rows(tmp_path / EXPERTS)
    assert row == {
        "step": 7,
        "layers": {
            "blocks.0.moe": {"tokens": [7, 7, 7, 7], "dropped": 1, "entropy": 0.5},
            "blocks.1.moe": {"tokens": [0, 0, 0, 0], "dropped": 0, "entropy": None},
        },
    }


def test_rows_grow_rarer_as_the_docstring_says():
    kept = [index for index in range(64) if is_kept(index, 4)]
    assert kept == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]


@pytest.mark.parametrize(("counts", "rows"), [(8, 1024), (1024, 1024), (1025, 512), (58 * 256, 64), (10**7, 64)])
def test_layers_with_many_experts_have_fewer_rows(counts, rows):
    assert full_rows(counts) == rows


def test_a_long_run_has_a_small_file(tmp_path):
    write(tmp_path, 1, 20_000, experts=1)
    assert len(steps(tmp_path)) < 1024 + 512 * 5
    assert steps(tmp_path)[:1023] == list(range(1, 1024))
    gaps = {b - a for a, b in zip(steps(tmp_path), steps(tmp_path)[1:], strict=False)}
    assert gaps == {1, 2, 4, 8, 16, 32}


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("overrun", [0, 1, 37])
def test_one_go_and_a_resume_leave_the_same_bytes(tmp_path, every, overrun, monkeypatch):
    monkeypatch.setattr("moeflow.train.expert_log._ROWS", (64, 64))
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    write(whole, 1, 200, every=every)
    write(parts, 1, 100 + overrun, every=every)
    write(parts, 101, 200, resume_step=100, every=every)
    assert (whole / EXPERTS).read_bytes() == (parts / EXPERTS).read_bytes()
    assert len(steps(whole)) == {1: 63 + 32 + 18 + 1, 5: 41}[every]


def test_a_torn_line_is_moved_out_by_a_resume(tmp_path):
    write(tmp_path, 1, 3)
    with open(tmp_path / EXPERTS, "ab") as stream:
        stream.write(b'{"step":4,"lay')
    write(tmp_path, 4, 5, resume_step=3)
    assert [json.loads(line)["step"] for line in (tmp_path / EXPERTS).read_bytes().splitlines()] == [1, 2, 3, 4, 5]
    assert (tmp_path / "experts.discarded.jsonl").read_bytes() == b'{"step":4,"lay\n'


def test_without_moe_layers_or_on_another_rank_there_is_no_file(tmp_path):
    log = ExpertLog(tmp_path, 1)
    log.log(1, {})
    log.close()
    log = ExpertLog(tmp_path, 1, rank=1)
    log.log(1, loads(1))
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_named(tmp_path):
    log = ExpertLog(tmp_path / "gone", 1)
    with pytest.raises(MoeflowError, match=r"experts.jsonl cannot be written"):
        log.log(1, loads(1))


def test_a_row_costs_little():
    """12 layers of 64 experts: well under a thousandth of a step."""
    layers = {f"blocks.{n}.moe": LayerLoad(list(range(64)), 3, 1.5) for n in range(12)}
    log = ExpertLog("/dev", 1)  # never opened here
    log.path = Path("/dev/null")
    started = time.process_time()
    for _ in range(200):
        log.log(1, layers)
    assert (time.process_time() - started) / 200 < 0.005
    log.close()


# --- from real runs ---------------------------------------------------------------------------------------------------

BY_NAME = {place.name: place for place in PLACES}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Rows of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(BY_NAME["1 process"], folder, stop_at=4)
    return list(read_rows(folder / EXPERTS))


def test_every_choice_of_a_step_is_in_its_row(alone):
    assert [row["step"] for row in alone] == [1, 2, 3, 4]
    for row in alone:
        assert [len(layer["tokens"]) for layer in row["layers"].values()] == [4, 4]
        assert len({sum(layer["tokens"]) for layer in row["layers"].values()}) == 1
        assert all(0 < layer["entropy"] <= math.log(4) for layer in row["layers"].values())


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["tp=2 x ep=2", "pp=2 x ep=2"])
def test_each_layout_records_the_same(name, alone, tmp_path):
    run(BY_NAME[name], tmp_path / "run", stop_at=2)
    rows = list(read_rows(tmp_path / "run" / EXPERTS))
    assert [row["step"] for row in rows] == [1, 2]
    for ours, theirs in zip(alone, rows, strict=False):
        assert list(ours["layers"]) == list(theirs["layers"])
        for mine, other in zip(ours["layers"].values(), theirs["layers"].values(), strict=True):
            # A pipeline's last micro-batch is a part of the whole.
            parts = sum(mine["tokens"]) // sum(other["tokens"])
            assert sum(mine["tokens"]) == parts * sum(other["tokens"])
            assert parts == (2 if "pp" in name else 1)
            if parts == 1:
                assert mine["tokens"] == other["tokens"]
                assert mine["entropy"] == pytest.approx(other["entropy"], rel=1e-4)


@pytest.mark.distributed
def test_a_resume_goes_on_with_the_same_rows(alone, tmp_path):
    place = BY_NAME["1 process"]
    run(place, tmp_path / "run", stop_at=2)
    run(place, tmp_path / "run", stop_at=4, resume=True)
    assert list(read_rows(tmp_path / "run" / EXPERTS)) == alone
