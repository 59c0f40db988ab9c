"""The GShard gate against algorithm 1 of its paper, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeflow.errors import ConfigError
from moeflow.moe.gates import Gate, build_gate
from moeflow.schema.gate import GShardGateConfig
from tests.moe.gates.statement import CASES, balance, check_numerically, choose, compare, linear, make, rows, softmax


def gshard(gate: Gate, x: Tensor):
    probs = [softmax(row) for row in linear(gate, x)]
    ids = [choose(row, 2) for row in probs]
    weights = [p[chosen] / p[chosen].sum() for p, chosen in zip(probs, ids)]
    losses = {}
    if gate.training:
        losses["load_balance"] = balance(probs, [chosen[:1] for chosen in ids], gate.num_experts, 1)
        draws = torch.rand(len(x), dtype=torch.float64)
        ids = [[a, b] if draw < 2 * w[1] else [a, -1] for (a, b), w, draw in zip(ids, weights, draws)]
    return ids, rows(weights, 2), losses


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_formula(case: str, training: bool):
    gate, x = make("gshard", case)
    compare(gate.train(training), x, gshard)


def test_gradients_numerically():
    check_numerically(*make("gshard"))


def test_second_choices_are_kept_as_often_as_the_formula_says():
    gate, x = make("gshard", num_tokens=6)
    share = gate.eval()(x).weights_TK[:, 1]
    gate.train()
    kept = sum((gate(x).ids_TK[:, 1] >= 0).double() for _ in range(2000)) / 2000
    expected = (2 * share).clamp(max=1)
    assert (kept - expected).abs().max() < 0.05  # 4 standard deviations are at most 0.045


def test_without_chance_every_second_choice_stays():
    gate, x = make("gshard", random_second=False)
    assert (gate(x).ids_TK >= 0).all()


def test_loss_does_not_depend_on_how_experts_are_spread():
    # It is taken over all experts of the layer: uniform probabilities give 1 for any number of them.
    for num_experts in (2, 8, 32):
        gate, x = make("gshard", "tied", num_experts=num_experts)
        torch.testing.assert_close(gate(x).losses["load_balance"][1].item(), 1.0)


def test_k_is_two():
    with pytest.raises(ConfigError, match="top_k"):
        build_gate(GShardGateConfig(), 4, 1)
