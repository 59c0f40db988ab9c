"""The sinkhorn gate: against scaling rows and columns in Python, and against what its fixed point must be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeflow.moe.gates import Gate, TokenContext
from moeflow.moe.gates.sinkhorn import sinkhorn
from tests.moe.gates.statement import CASES, check_numerically, choose, compare, linear, make, rows


def scaled_by_loop(logits: list[Tensor], tolerance: float, limit: int) -> list[list[float]]:
    cost = [row.exp().tolist() for row in logits]
    num_tokens, num_experts = len(cost), len(cost[0]) if cost else 0
    column, row_scale = [1.0] * num_experts, [1.0] * num_tokens
    for _ in range(limit):
        row_scale = [1 / num_tokens / sum(c * v for c, v in zip(column, cost[t])) for t in range(num_tokens)]
        new = [1 / num_experts / sum(row_scale[t] * cost[t][e] for t in range(num_tokens)) for e in range(num_experts)]
        change = sum(abs(a - b) for a, b in zip(new, column)) / max(num_experts, 1)
        column = new
        if change <= tolerance:
            break
    return [[column[e] * cost[t][e] * row_scale[t] for e in range(num_experts)] for t in range(num_tokens)]


def gate_by_loop(gate: Gate, x: Tensor):
    logits = linear(gate, x)
    scores = [1 / (1 + (-row).exp()) for row in logits]
    source = scores
    if gate.training:
        source = [
            torch.tensor(row) for row in scaled_by_loop(logits, gate.config.tolerance, gate.config.max_iterations)
        ]
    ids = [choose(row, gate.top_k) for row in source]
    weights = [
        s[chosen] / (s[chosen].sum() if gate.config.renormalize == "before" else 1) for s, chosen in zip(scores, ids)
    ]
    return ids, rows(weights, gate.top_k), {}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("top_k", "renormalize"), [(1, "none"), (2, "before")])
@pytest.mark.parametrize("case", CASES)
def test_formula(case: str, top_k: int, renormalize: str, training: bool):
    gate, x = make("sinkhorn", case, top_k=top_k, score="sigmoid", renormalize=renormalize)
    if case in ("tied", "one token") and training:
        # Balanced, all entries are equal up to rounding, as are those of one token: which is the largest means nothing.
        out = gate(x)
        weights = torch.sigmoid(gate.logits(x)).gather(1, out.ids_TK)
        torch.testing.assert_close(out.weights_TK, weights / weights.sum(1, keepdim=True) if top_k == 2 else weights)
        return
    compare(gate.train(training), x, gate_by_loop)


def test_gradients_numerically():
    check_numerically(*make("sinkhorn", top_k=1, score="sigmoid", renormalize="none"))


def test_columns_are_even_at_the_fixed_point():
    torch.manual_seed(0)
    logits = torch.randn(64, 8) * 2
    logits[:, 3] += 5  # everyone's favorite
    plan = sinkhorn(logits, tolerance=1e-9, max_iterations=2000)
    torch.testing.assert_close(plan.mean(0), torch.full((8,), 1 / 8), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(plan.sum(1), torch.ones(64), rtol=1e-3, atol=1e-5)
    assert logits.argmax(1).bincount(minlength=8).max() > 40
    assert plan.argmax(1).bincount(minlength=8).max() < 20


def test_huge_logits_do_not_overflow():
    assert sinkhorn(torch.tensor([[1e4, 0.0], [9e3, -1e4], [0.0, 1e4]])).isfinite().all()


def test_split_over_ranks_gives_the_same_plan():
    torch.manual_seed(1)
    logits = torch.randn(24, 6)
    whole = sinkhorn(logits)
    # Two ranks with 10 and 14 tokens, in lockstep: each needs the other's means.
    import threading

    parts, values, barrier = (logits[:10], logits[10:]), [None, None], threading.Barrier(2, timeout=20)
    results: list[Tensor | None] = [None, None]

    def rank(r: int) -> None:
        def batch_mean(mean: Tensor) -> Tensor:
            values[r] = mean
            barrier.wait()
            total = (values[0] + values[1]) / 2
            barrier.wait()
            return total

        results[r] = sinkhorn(parts[r], batch_mean=batch_mean)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(torch.cat(results), whole, rtol=1e-4, atol=1e-6)


def test_masked_tokens_do_not_weigh():
    gate, x = make("sinkhorn", top_k=1)
    valid = torch.arange(13) % 2 == 0
    out = gate(x, TokenContext(valid_T=valid))
    assert torch.equal(out.ids_TK[valid], gate(x[valid]).ids_TK)
    assert (out.ids_TK[~valid] == -1).all()
