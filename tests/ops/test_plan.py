"""make_plan and histogram against loops."""

from __future__ import annotations

import pytest
import torch

from moeflow import ops


def plan_by_loop(ids: list[list[int]], num_experts: int) -> tuple[list[int], list[list[int]], list[int]]:
    """Append every slot to its expert's list, in order; then number the lists through."""
    top_k = len(ids[0]) if ids else 1
    slots_of = [[] for _ in range(num_experts)]
    for t, row in enumerate(ids):
        for k, e in enumerate(row):
            if e >= 0:
                slots_of[e].append(t * top_k + k)
    row_of = [[-1] * top_k for _ in ids]
    order = [slot for slots in slots_of for slot in slots]
    for r, slot in enumerate(order):
        row_of[slot // top_k][slot % top_k] = r
    return [len(s) for s in slots_of], row_of, order


CASES = {
    "random": lambda: (torch.randint(0, 5, (40, 2)), 5),
    "dropped": lambda: (torch.randint(-1, 5, (40, 3)), 5),
    "one expert takes all": lambda: (torch.full((17, 1), 3), 6),
    "all dropped": lambda: (torch.full((9, 2), -1), 4),
    "no tokens": lambda: (torch.empty(0, 2, dtype=torch.int64), 4),
    "one expert in all": lambda: (torch.zeros(5, 1, dtype=torch.int64), 1),
    "more than 256 experts": lambda: (torch.randint(-1, 700, (300, 4)), 700),
    "K = E": lambda: (torch.stack([torch.randperm(4) for _ in range(11)]), 4),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("case", CASES)
def test_plan_matches_the_loop(case: str, dtype: torch.dtype):
    torch.manual_seed(0)
    ids, num_experts = CASES[case]()
    plan = ops.make_plan(ids.to(dtype), num_experts)
    counts, row_of, slot_of_row = plan_by_loop(ids.tolist(), num_experts)
    assert plan.tokens_per_expert_E.tolist() == counts
    assert plan.row_of_TK.tolist() == row_of
    assert plan.slot_of_row_R.tolist() == slot_of_row
    assert plan.tokens_per_expert_E.dtype == torch.int64
    assert plan.row_of_TK.dtype == plan.slot_of_row_R.dtype == torch.int32


def test_promise_of_no_drops_gives_the_same_plan():
    ids = torch.randint(0, 6, (31, 2))
    promised, looked = ops.make_plan(ids, 6, may_drop=False), ops.make_plan(ids, 6)
    for name in ("tokens_per_expert_E", "row_of_TK", "slot_of_row_R"):
        assert torch.equal(getattr(promised, name), getattr(looked, name))


@pytest.mark.parametrize("capacity", [0, 1, 4, 50])
def test_padded_plan_matches_the_loop(capacity: int):
    torch.manual_seed(capacity)
    ids = ops.limit_by_capacity(torch.randint(-1, 5, (12, 3)), 5, capacity)
    plan = ops.make_padded_plan(ids, 5, capacity)
    row_of, slot_of_row = [[-1] * 3 for _ in range(12)], [-1] * (5 * capacity)
    used = [0] * 5
    for slot, e in enumerate(ids.flatten().tolist()):
        if e >= 0:
            row_of[slot // 3][slot % 3] = e * capacity + used[e]
            slot_of_row[e * capacity + used[e]] = slot
            used[e] += 1
    assert plan.padded
    assert plan.tokens_per_expert_E.tolist() == [capacity] * 5
    assert plan.row_of_TK.tolist() == row_of
    assert plan.slot_of_row_R.tolist() == slot_of_row


@pytest.mark.parametrize("shape", [(0,), (7,), (40, 3), (2, 3, 4)])
def test_histogram_matches_a_count(shape: tuple[int, ...]):
    ids = torch.randint(-2, 6, shape)
    flat = ids.flatten().tolist()
    assert ops.histogram(ids, 6).tolist() == [flat.count(e) for e in range(6)]


@pytest.mark.parametrize("may_drop", [True, False])
def test_opcheck(may_drop: bool):
    ids = torch.randint(-1 if may_drop else 0, 4, (10, 2))
    torch.library.opcheck(torch.ops.moeflow.make_plan.default, (ids, 4, may_drop))
    torch.library.opcheck(torch.ops.moeflow.histogram.default, (ids, 4))
    torch.library.opcheck(torch.ops.moeflow.make_padded_plan.default, (ids, 4, 10))
