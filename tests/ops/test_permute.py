"""dispatch and combine against loops over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeflow import ops


def make_case(num_tokens: int, top_k: int, num_experts: int = 4, width: int = 3, low: int = -1, dtype=torch.float64):
    torch.manual_seed(num_tokens + top_k)
    plan = ops.make_plan(torch.randint(low, num_experts, (num_tokens, top_k)), num_experts)
    num_rows = plan.slot_of_row_R.shape[0]
    x = torch.randn(num_tokens, width, dtype=dtype)
    rows = torch.randn(num_rows, width, dtype=dtype)
    weights = torch.randn(num_tokens, top_k, dtype=dtype)
    return plan, x, rows, weights


def dispatch_by_loop(x: Tensor, plan: ops.DispatchPlan) -> Tensor:
    rows = x.new_full((plan.slot_of_row_R.shape[0], x.shape[1]), float("nan"))
    for t, row_of in enumerate(plan.row_of_TK.tolist()):
        for r in row_of:
            if r >= 0:
                rows[r] = x[t]
    return rows


def combine_by_loop(rows: Tensor, plan: ops.DispatchPlan, weights: Tensor | None) -> Tensor:
    y = rows.new_zeros(plan.row_of_TK.shape[0], rows.shape[1])
    for t, row_of in enumerate(plan.row_of_TK.tolist()):
        for k, r in enumerate(row_of):
            if r >= 0:
                y[t] += rows[r] * (1 if weights is None else weights[t, k])
    return y


SHAPES = [(0, 2), (1, 1), (23, 2), (50, 4)]


@pytest.mark.parametrize(("num_tokens", "top_k"), SHAPES)
def test_dispatch_matches_the_loop(num_tokens: int, top_k: int):
    plan, x, _, _ = make_case(num_tokens, top_k)
    assert torch.equal(ops.dispatch(x, plan), dispatch_by_loop(x, plan))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("num_tokens", "top_k"), SHAPES)
def test_combine_matches_the_loop(num_tokens: int, top_k: int, weighted: bool):
    plan, _, rows, weights = make_case(num_tokens, top_k)
    weights = weights if weighted else None
    torch.testing.assert_close(ops.combine(rows, plan, weights), combine_by_loop(rows, plan, weights))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_combine_sums_half_types_in_fp32(dtype: torch.dtype):
    plan, _, rows, weights = make_case(64, 4, low=0, dtype=torch.float32)
    rows, weights = rows.to(dtype), weights.to(dtype)
    exact = combine_by_loop(rows.double(), plan, weights.double())
    y = ops.combine(rows, plan, weights)
    assert y.dtype == dtype
    # One rounding at the end, not one for each addition.
    assert (y.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps / 2 * 1.01


def test_round_trip_of_undropped_tokens_multiplies_by_k():
    plan, x, _, _ = make_case(30, 3, low=0)
    torch.testing.assert_close(ops.combine(ops.dispatch(x, plan), plan), 3 * x)


def test_everything_dropped_gives_zeros_and_zero_gradients():
    plan = ops.make_plan(torch.full((5, 2), -1), 3)
    x = torch.randn(5, 4, requires_grad=True)
    weights = torch.randn(5, 2, requires_grad=True)
    y = ops.combine(ops.dispatch(x, plan), plan, weights)
    y.backward(torch.randn(5, 4))
    assert y.tolist() == [[0.0] * 4] * 5
    assert x.grad.abs().sum() == 0
    assert weights.grad.abs().sum() == 0


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_a_dropped_choice_keeps_poison_out(poison: float):
    # The weight of a dropped choice, and the row that an unmasked gather would read for it, must not matter.
    plan = ops.make_plan(torch.tensor([[0, 1], [1, -1], [-1, -1]]), 2)
    rows = torch.ones(3, 2)
    rows[0] = poison  # token 0's first choice; row -1 clamped to 0 would be this one
    weights = torch.tensor([[1.0, 1.0], [2.0, poison], [poison, poison]], requires_grad=True)
    y = ops.combine(rows, plan, weights)
    assert y[1].tolist() == [2.0, 2.0]
    assert y[2].tolist() == [0.0, 0.0]
    y[1:].sum().backward()
    assert weights.grad[1:].tolist() == [[2.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 1), (7, 2), (6, 3)])
def test_gradients(num_tokens: int, top_k: int):
    plan, x, rows, weights = make_case(num_tokens, top_k)
    x, rows, weights = (t.requires_grad_() for t in (x, rows, weights))
    assert torch.autograd.gradcheck(lambda x: ops.dispatch(x, plan), x)
    assert torch.autograd.gradcheck(lambda r: ops.combine(r, plan), rows)
    assert torch.autograd.gradcheck(lambda r, w: ops.combine(r, plan, w), (rows, weights))


def test_second_derivatives_of_the_copies():
    plan, x, rows, _ = make_case(5, 2)
    assert torch.autograd.gradgradcheck(lambda x: ops.dispatch(x, plan), x.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda r: ops.combine(r, plan), rows.requires_grad_())


def test_expanded_upstream_gradient():
    plan, x, _, weights = make_case(9, 2)
    x.requires_grad_()
    ops.combine(ops.dispatch(x, plan), plan, weights).sum().backward()
    kept = (plan.row_of_TK >= 0).double()
    torch.testing.assert_close(x.grad, (kept * weights).sum(1, keepdim=True).expand(-1, 3))


def test_results_are_bitwise_the_same_on_every_run():
    plan, _, rows, weights = make_case(300, 4, num_experts=16, width=64, dtype=torch.float32)
    once = ops.combine(rows, plan, weights)
    assert all(torch.equal(once, ops.combine(rows, plan, weights)) for _ in range(3))


def padded_case(num_tokens: int, capacity: int, dtype=torch.float64):
    torch.manual_seed(num_tokens)
    ids = ops.limit_by_capacity(torch.randint(-1, 4, (num_tokens, 2)), 4, capacity)
    plan, padded = ops.make_plan(ids, 4), ops.make_padded_plan(ids, 4, capacity)
    return plan, padded, torch.randn(num_tokens, 3, dtype=dtype), torch.randn(num_tokens, 2, dtype=dtype)


@pytest.mark.parametrize(("num_tokens", "capacity"), [(0, 0), (0, 2), (9, 0), (20, 3), (20, 20)])
def test_padding_changes_nothing_but_the_shapes(num_tokens: int, capacity: int):
    plan, padded, x, weights = padded_case(num_tokens, capacity)
    rows = ops.dispatch(x, padded)
    assert rows.shape == (4 * capacity, 3)
    segments = rows.view(4, capacity, 3)
    for e, part in enumerate(ops.dispatch(x, plan).split(plan.tokens_per_expert_E.tolist())):
        assert torch.equal(segments[e, : len(part)], part)
        assert segments[e, len(part) :].abs().sum() == 0
    results = []
    for p in (plan, padded):
        a, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = ops.combine(ops.dispatch(a, p).sin(), p, w)
        y.backward(torch.arange(y.numel(), dtype=y.dtype).view_as(y))
        results.append((y, a.grad, w.grad))
    for ours, theirs in zip(*results):
        assert torch.equal(ours, theirs)


def test_padding_rows_may_hold_anything_after_the_experts():
    _, padded, x, weights = padded_case(10, 4)
    rows = ops.dispatch(x, padded)
    rows[padded.slot_of_row_R < 0] = float("nan")
    rows, weights = rows.requires_grad_(), weights.requires_grad_()
    y = ops.combine(rows, padded, weights)
    y.sum().backward()
    assert y.isfinite().all()
    assert weights.grad.isfinite().all()
    assert rows.grad[padded.slot_of_row_R < 0].abs().sum() == 0


@pytest.mark.parametrize("padded", [False, True])
def test_opcheck(padded: bool):
    plan, x, rows, weights = make_case(6, 2)
    if padded:
        _, plan, x, weights = padded_case(6, 3)
        rows = torch.randn(12, 3, dtype=torch.float64)
    x, rows, weights = (t.requires_grad_() for t in (x, rows, weights))
    maps = (plan.row_of_TK, plan.slot_of_row_R, plan.padded)
    check = torch.library.opcheck
    check(torch.ops.moeflow.dispatch.default, (x, *maps))
    check(torch.ops.moeflow.gather_sum.default, (rows, *maps))
    check(torch.ops.moeflow.combine.default, (rows, weights, *maps))
    check(torch.ops.moeflow.combine_backward.default, (x.detach(), rows.detach(), weights.detach(), *maps))
