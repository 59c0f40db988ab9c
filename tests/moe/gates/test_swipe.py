"""The SWIPE gate: the even share is kept exactly, nothing is lost, nothing doubled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moeflow.moe.gates import Gate, TokenContext
from moeflow.moe.gates.swipe import even_out
from tests.moe.gates.statement import CASES, check_numerically, choose, compare, linear, make, rows, softmax


def swipe(gate: Gate, x: Tensor):
    """Hand out places one by one; a choice that finds its expert full takes the best one with room."""
    k, num_experts = gate.top_k, gate.num_experts
    probs = [softmax(row) for row in linear(gate, x)]
    ids = [choose(row, k) for row in probs]
    if gate.training:
        capacity = math.ceil(len(ids) * k / num_experts)
        load = [0] * num_experts
        late = []
        for j in range(k):
            for t in range(len(ids)):
                if load[ids[t][j]] < capacity:
                    load[ids[t][j]] += 1
                else:
                    ids[t][j] = -1
                    late.append((t, j))
        for t, j in late:
            free = [e for e in choose(probs[t], num_experts) if load[e] < capacity and e not in ids[t]]
            assert free, "these inputs need no swap"
            ids[t][j] = free[0]
            load[free[0]] += 1
    weights = [p[chosen] / p[chosen].sum() for p, chosen in zip(probs, ids)]
    return ids, rows(weights, k), {}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_formula(case: str, top_k: int, training: bool):
    gate, x = make("swipe", case, top_k=top_k, num_tokens=10)
    compare(gate.train(training), x, swipe)


def test_gradients_numerically():
    check_numerically(*make("swipe", "skewed"))


@pytest.mark.parametrize("seed", range(40))
def test_shares_are_kept_and_nothing_is_lost_or_doubled(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(1, high, (), generator=generator))

    num_tokens, num_experts = draw(40), draw(9)
    top_k = min(draw(num_experts + 1), num_experts)
    # Few distinct preferences, so that most choices collide and swaps are needed.
    scores = torch.rand(2, num_experts, generator=generator)[torch.randint(0, 2, (num_tokens,), generator=generator)]
    ids = scores.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    out = even_out(ids, scores)
    assert ((out >= 0) & (out < num_experts)).all()
    assert all(len(set(row)) == top_k for row in out.tolist())
    assert out.flatten().bincount(minlength=num_experts).max() <= math.ceil(num_tokens * top_k / num_experts)


def test_a_swap_makes_room():
    # Experts 0 and 1 are full after tokens 0 and 1; token 2 finds room at expert 2 alone, and needs two experts.
    ids = torch.tensor([[0, 1], [0, 1], [0, 1]])
    out = even_out(ids, torch.tensor([[0.5, 0.3, 0.2]] * 3))
    assert out.flatten().bincount(minlength=3).tolist() == [2, 2, 2]
    assert all(len(set(row)) == 2 for row in out.tolist())


def test_an_even_load_is_left_alone():
    ids = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]])
    assert even_out(ids, torch.rand(4, 4)) is ids


def test_masked_tokens_take_no_place():
    gate, x = make("swipe", "skewed")
    valid = torch.arange(13) % 3 != 0
    out = gate(x, TokenContext(valid_T=valid))
    assert torch.equal(out.ids_TK[valid], gate(x[valid]).ids_TK)
    assert (out.ids_TK[~valid] == -1).all()
