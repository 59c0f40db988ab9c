"""Killed at random moments, each life goes on from the last completed checkpoint; the end is the same to the bit."""

import pytest

from tests.train.kills import config_for, killed, unbroken
from tests.train.runs import losses, rows
from tests.train.test_runs import saved_tensors

STEPS = 400


def check(folder, world, kills, steps, background=False, seed=0, parallel=None):
    config = config_for(world, steps, background, parallel)
    unbroken(config, world, folder / "unbroken")
    toll = killed(config, world, folder / "killed", kills, seed)
    assert toll.kills == kills
    assert len(losses(folder / "killed")) == steps
    assert rows(folder / "killed") == rows(folder / "unbroken")
    one, other = (saved_tensors(folder / name, steps) for name in ("unbroken", "killed"))
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.equal(other[key]), key
    return toll


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_a_few_kills_of_one_of_two_ranks(tmp_path):
    check(tmp_path, 2, 2, 24)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"ep": 2, "engine": "deepspeed", "zero_stage": 0}),
        (4, {"ep": 2, "engine": "deepspeed", "zero_stage": 1}),
        (2, {"ep": 2, "engine": "deepspeed", "zero_stage": 2}),
        (4, {"ep": 2, "engine": "fsdp"}),
    ],
    ids=str,
)
def test_kills_on_every_engine(tmp_path, world, parallel, background):
    check(tmp_path, world, 4, 48, background, parallel=parallel)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_fifty_kills(tmp_path, world, background):
    toll = check(tmp_path, world, 50, STEPS, background)
    assert toll.during_saves > 0
