"""Capacity: who is kept, against loops that hand out places one by one."""

from __future__ import annotations

import math

import pytest
import torch

from moeflow import ops


def keep_by_loop(
    ids: list[list[int]], num_experts: int, capacity: int, order: list[tuple[int, int]]
) -> list[list[int]]:
    """Hand out places in the given order of (token, choice)."""
    taken = [0] * num_experts
    kept = [[-1] * len(row) for row in ids]
    for t, k in order:
        e = ids[t][k]
        if e >= 0 and taken[e] < capacity:
            taken[e] += 1
            kept[t][k] = e
    return kept


def choice_major(num_tokens: int, top_k: int) -> list[tuple[int, int]]:
    return [(t, k) for k in range(top_k) for t in range(num_tokens)]


@pytest.mark.parametrize("capacity", [0, 1, 3, 10, 1000])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (1, 1), (30, 1), (30, 2), (21, 4)])
def test_by_position(num_tokens: int, top_k: int, capacity: int):
    torch.manual_seed(capacity)
    ids = torch.randint(-1, 5, (num_tokens, top_k))
    kept = ops.limit_by_capacity(ids, 5, capacity)
    assert kept.dtype == ids.dtype
    assert kept.tolist() == keep_by_loop(ids.tolist(), 5, capacity, choice_major(num_tokens, top_k))


def test_first_choices_go_before_second_ones():
    ids = torch.tensor([[0, 1], [1, 0], [1, 0]])
    assert ops.limit_by_capacity(ids, 2, 2).tolist() == [[0, -1], [1, 0], [1, -1]]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("capacity", [0, 1, 4, 9])
def test_by_probability(capacity: int, ties: bool):
    torch.manual_seed(capacity)
    ids = torch.randint(-1, 4, (25, 2))
    priority = torch.randint(0, 3, (25, 2)).float() if ties else torch.rand(25, 2)
    order = sorted(choice_major(25, 2), key=lambda tk: -priority[tk].item())  # sorted() is stable: ties by position
    kept = ops.limit_by_capacity(ids, 4, capacity, "probability", priority)
    assert kept.tolist() == keep_by_loop(ids.tolist(), 4, capacity, order)


def test_at_random():
    ids = torch.zeros(200, 1, dtype=torch.int64)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(ops.limit_by_capacity(ids, 2, 50, "random"))
    assert torch.equal(draws[0], draws[1]), "the same seed keeps the same tokens"
    assert not torch.equal(draws[0], draws[2])
    assert all((d >= 0).sum() == 50 for d in draws)
    # Every token has the same chance: position must not matter.  1,000 draws of 1 of 4 give 250 +- 14 each.
    torch.manual_seed(2)
    wins = sum((ops.limit_by_capacity(ids[:4], 2, 1, "random") >= 0).long().flatten() for _ in range(1000))
    assert wins.sum() == 1000
    assert (wins - 250).abs().max() < 60


@pytest.mark.parametrize("policy", ["position", "probability", "random"])
def test_an_expert_is_filled_exactly(policy: str):
    torch.manual_seed(3)
    ids = torch.randint(-1, 6, (80, 3))
    kept = ops.limit_by_capacity(ids, 6, 17, policy, torch.rand(80, 3))
    demand, got = ops.histogram(ids, 6), ops.histogram(kept, 6)
    assert torch.equal(got, demand.clamp(max=17))
    assert ((kept == ids) | (kept == -1)).all()


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "factor", "expected"),
    [(0, 4, 2, 1.0, 0), (1, 8, 1, 1.0, 1), (100, 10, 1, 1.1, 11), (100, 10, 2, 1.25, 25), (7, 3, 2, 1.0, 5)],
)
def test_formula(tokens: int, experts: int, top_k: int, factor: float, expected: int):
    assert ops.expert_capacity(tokens, experts, top_k, factor) == expected
    assert expected >= factor * top_k * tokens / experts - 1e-9
    assert expected < math.ceil(factor * top_k * tokens / experts) + 1
