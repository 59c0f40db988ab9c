"""A small gpt_moe follows the run of one process on every layout: a sample quickly, all of them in the slow tests."""

from __future__ import annotations

import pytest

from tests.parallel import parity
from tests.parallel.parity import Case

SAMPLE = [
    Case(2, {"ep": 2}, {"grad_accum": 2}),
    Case(2, {"pp": 2, "pp_schedule": "interleaved"}),
    Case(4, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    Case(4, {"tp": 2, "ep": 2, "etp": 2}),
    Case(4, {"ep": 2}),  # edp 2
    Case(4, {"pp": 2, "ep": 2, "pp_schedule": "gpipe"}),
    Case(8, {"pp": 2, "tp": 2, "ep": 2}),  # 1f1b, edp 2
    Case(8, {"pp": 2, "etp": 2}),  # tied embeddings, whose gradients four ranks of each stage add
]


@pytest.fixture(scope="module")
def alone():
    return parity.reference()


@pytest.mark.distributed
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_layouts_follow_one_process(case, alone):
    found = parity.compare(case, alone)
    assert found.holds, found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("case", parity.all_cases(), ids=str)
def test_every_layout_follows_one_process(case, alone):
    found = parity.compare(case, alone)
    assert found.holds, found


def test_the_matrix_holds_every_kind_of_layout():
    cases = parity.all_cases()
    assert len({str(case) for case in cases}) == len(cases)
    seen = {(case.world, key, value) for case in cases for key, value in {**case.parallel, **case.more}.items()}
    for world in (2, 4, 8):
        for need in (("ep", 2), ("tp", 2), ("etp", 2), ("pp", 2), ("grad_accum", 2), ("sequence_parallel", True)):
            assert (world, *need) in seen, (world, need)
        for schedule in ("gpipe", "1f1b", "interleaved"):
            assert (world, "pp_schedule", schedule) in seen, (world, schedule)
    assert (8, "ep", 8) in seen and (8, "pp", 4) in seen


def test_a_difference_does_not_hold():
    assert not parity.Difference(2e-5, 0.0, 0.0, True).holds
    assert not parity.Difference(0.0, 0.0, 2e-5, True).holds
    assert not parity.Difference(0.0, 0.0, 0.0, False).holds
