"""What one rank meets while building the data reaches all of them at once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moeflow.errors import DataError
from moeflow.train import session
from tests.distributed import run_ranks
from tests.parallel.gpt_run import config_of


def _build(faulty: int | None, other_text: int | None, folder: str) -> str:
    config = config_of({})
    accelerator, topology = session.join(config)
    path = Path(folder) / f"text{int(topology.rank == other_text)}.txt"
    path.write_text("so it goes on " * (500 + int(topology.rank == other_text)))
    config.data.path = str(path if topology.rank != faulty else Path(folder) / "none.txt")
    config.data.source = "auto"
    started = time.monotonic()
    try:
        session.open_session(config, accelerator, topology)
    except DataError as error:
        assert time.monotonic() - started < 20
        return str(error)
    return "built"


@pytest.mark.distributed
@pytest.mark.parametrize("faulty", [0, 1])
def test_a_rank_without_its_file_ends_all(faulty, tmp_path):
    said = run_ranks(_build, 2, faulty, None, str(tmp_path), timeout=60, init=False)
    assert said[0] == said[1]
    assert "none.txt" in said[0]


@pytest.mark.distributed
def test_ranks_that_see_other_data_are_told(tmp_path):
    said = run_ranks(_build, 2, None, 1, str(tmp_path), timeout=60, init=False)
    assert all("the ranks see different data: rank 0: text:" in each for each in said)


@pytest.mark.distributed
def test_ranks_that_see_the_same_go_on(tmp_path):
    assert run_ranks(_build, 2, None, None, str(tmp_path), timeout=60, init=False) == ["built", "built"]
