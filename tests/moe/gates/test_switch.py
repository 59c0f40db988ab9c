"""The Switch gate against its formulas, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeflow.moe import MoELayer
from moeflow.moe.gates import Gate
from tests.moe.gates.statement import CASES, balance, check_numerically, choose, compare, linear, make, rows, softmax


def switch(gate: Gate, x: Tensor):
    if gate.training:
        jitter = gate.config.jitter
        x = x * torch.empty_like(x).uniform_(1 - jitter, 1 + jitter)
    probs = [softmax(row) for row in linear(gate, x)]
    ids = [choose(row, 1) for row in probs]
    losses = {"load_balance": balance(probs, ids, gate.num_experts, 1)} if gate.training else {}
    return ids, rows([p[chosen] for p, chosen in zip(probs, ids)], 1), losses


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_formula(case: str, training: bool):
    gate, x = make("switch", case, jitter=0.1)
    compare(gate.train(training), x, switch)


def test_gradients_numerically():
    check_numerically(*make("switch", jitter=0.1))


def test_jitter_stays_within_its_bounds_and_changes():
    gate, x = make("switch", jitter=0.2, num_tokens=50)
    exact = gate.eval().logits(x)
    with torch.no_grad():
        gate.proj.weight.abs_()
    x = x.abs()
    exact, jittered, again = gate.logits(x), gate.train().logits(x), gate.logits(x)
    assert (jittered / exact - 1).abs().max() <= 0.2
    assert not torch.equal(jittered, again)


def test_loss_counts_choices_before_capacity():
    torch.manual_seed(0)
    layer = MoELayer(4, 4, 8, "switch")
    layer.gate.config.jitter, layer.gate.config.capacity_factor = 0.0, 0.25
    x = torch.randn(64, 4)
    layer(x)
    assert layer.last_stats.num_dropped > 0
    probs = torch.softmax(x @ layer.gate.proj.weight.t(), 1)
    share = torch.bincount(probs.argmax(1), minlength=4) / 64
    torch.testing.assert_close(layer.last_stats.losses["load_balance"], 4 * (share * probs.mean(0)).sum().detach())
