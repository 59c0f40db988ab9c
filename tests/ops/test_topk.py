"""top_k against a sort written out in Python."""

from __future__ import annotations

import pytest
import torch

from moeflow import ops
from moeflow.errors import ConfigError


def top_k_by_sorting(scores: torch.Tensor, k: int) -> list[list[int]]:
    return [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in scores.tolist()]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"), [(0, 4, 2), (1, 1, 1), (50, 7, 3), (33, 8, 8), (20, 300, 2)]
)
def test_matches_a_stable_sort(num_tokens: int, num_experts: int, k: int):
    torch.manual_seed(num_tokens)
    scores = torch.randn(num_tokens, num_experts)
    values, ids = ops.top_k(scores, k)
    assert ids.shape == values.shape == (num_tokens, k)
    assert ids.dtype == torch.int64
    assert ids.tolist() == top_k_by_sorting(scores, k)
    assert torch.equal(values, scores.gather(1, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_ties_go_to_the_lowest_expert(dtype: torch.dtype):
    torch.manual_seed(0)
    scores = torch.randint(0, 3, (200, 9)).to(dtype)
    for k in (1, 2, 5, 9):
        assert ops.top_k(scores, k)[1].tolist() == top_k_by_sorting(scores, k)
    assert ops.top_k(torch.zeros(3, 5, dtype=dtype), 5)[1].tolist() == [[0, 1, 2, 3, 4]] * 3


def test_infinite_scores_are_each_chosen_once():
    inf = float("inf")
    scores = torch.tensor([[-inf, -inf, -inf, -inf], [-inf, 1.0, -inf, inf], [inf, 0.0, inf, -inf]])
    values, ids = ops.top_k(scores, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [3, 1, 0, 2], [0, 2, 1, 3]]
    assert torch.equal(values, scores.gather(1, ids))


def test_strided_scores():
    scores = torch.randn(6, 40).t()
    assert ops.top_k(scores, 2)[1].tolist() == top_k_by_sorting(scores, 2)


@pytest.mark.parametrize("k", [0, -1, 5])
def test_k_out_of_range_names_the_rule(k: int):
    with pytest.raises(ConfigError, match=r"gate.top_k=.*between 1 and the number of experts, 4"):
        ops.top_k(torch.zeros(2, 4), k)


def test_gradient():
    torch.manual_seed(1)
    # Distinct scores far apart, so that a finite difference does not change the order.
    scores = torch.stack([torch.randperm(6) for _ in range(5)]).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: ops.top_k(s, 3)[0], scores)
    scores.grad = None
    values, ids = ops.top_k(scores, 2)
    upstream = torch.randn(5, 2, dtype=torch.float64)
    values.backward(upstream)
    expected = torch.zeros(5, 6, dtype=torch.float64)
    for t in range(5):
        for j in range(2):
            expected[t, ids[t, j]] += upstream[t, j]
    assert torch.equal(scores.grad, expected)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_opcheck(num_tokens: int):
    torch.library.opcheck(torch.ops.moeflow.top_k.default, (torch.randn(num_tokens, 6, requires_grad=True), 2))
