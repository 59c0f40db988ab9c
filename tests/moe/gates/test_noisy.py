"""The noisy gate against its formulas, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moeflow.moe.gates import Gate, TokenContext
from tests.moe.gates.statement import CASES, check_numerically, choose, compare, linear, make, rows, softmax


def squared_variation(values: list[Tensor]) -> Tensor:
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return variance / (mean**2 + 1e-10)


def normal_cdf(value: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(value / math.sqrt(2)))


def noisy(gate: Gate, x: Tensor):
    k, num_experts = gate.top_k, gate.num_experts
    clean = linear(gate, x)
    noise = torch.randn(len(x), num_experts, dtype=torch.float64)
    ids, weights = [], []
    zero = torch.zeros((), dtype=torch.float64)
    importance, load = [zero] * num_experts, [zero] * num_experts
    for t, row in enumerate(clean):
        std = (1 + (gate.noise.weight @ x[t]).exp()).log() + 0.01
        h = row + noise[t] * std
        chosen = choose(h, k)
        w = softmax(h[chosen])
        ids.append(chosen)
        weights.append(w)
        for e, value in zip(chosen, w):
            importance[e] = importance[e] + value
        for e in range(num_experts):
            others = sorted((h[i] for i in range(num_experts) if i != e), key=lambda v: -v.item())
            if k < num_experts:  # the k-th best of the others is what e has to beat
                load[e] = load[e] + normal_cdf((row[e] - others[k - 1]) / std[e])
    losses = {"importance": squared_variation(importance)}
    losses["load"] = squared_variation(load) if k < num_experts else zero
    return ids, rows(weights, k), losses


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("case", CASES)
def test_formula(case: str, top_k: int):
    gate, x = make("noisy", case, top_k=top_k)
    with torch.no_grad():
        gate.noise.weight.normal_()
    compare(gate, x, noisy)


def test_gradients_numerically():
    check_numerically(*make("noisy"))


def test_evaluation_is_the_naive_gate():
    gate, x = make("noisy")
    out = gate.eval()(x)
    again = gate(x)
    assert torch.equal(out.ids_TK, again.ids_TK)
    torch.testing.assert_close(out.weights_TK, torch.softmax((x @ gate.proj.weight.t()).gather(1, out.ids_TK), 1))
    assert out.losses == {}


def test_masked_tokens_count_in_no_loss():
    gate, x = make("noisy")
    valid = torch.arange(13) % 3 != 1

    def only_valid(gate: Gate, x: Tensor):
        noise = torch.randn(13, 6, dtype=torch.float64)
        torch.manual_seed(0)
        original = torch.randn
        try:
            torch.randn = lambda *a, **k: noise[valid]
            ids, weights, losses = noisy(gate, x[valid])
        finally:
            torch.randn = original
        all_ids, all_weights = [[-1, -1] for _ in range(13)], torch.zeros(13, 2, dtype=torch.float64)
        for i, t in enumerate(valid.nonzero().flatten().tolist()):
            all_ids[t] = ids[i]
        all_weights = all_weights.index_put((valid.nonzero().flatten(),), weights)
        return all_ids, all_weights, losses

    compare(gate, x, only_valid, TokenContext(valid_T=valid))
