"""Expert choice against a loop over experts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moeflow.errors import ConfigError
from moeflow.moe import MoELayer
from moeflow.moe.gates import Gate, TokenContext, build_gate
from moeflow.schema.gate import ExpertChoiceGateConfig
from tests.moe.gates.statement import CASES, check_numerically, compare, linear, make, rows, softmax
from tests.moe.reference import all_experts, moe_by_loop


def expert_choice(gate: Gate, x: Tensor, pool: int | None = None):
    probs = [softmax(row) for row in linear(gate, x)]
    pool = pool or max(len(probs), 1)
    capacity = min(math.ceil(gate.config.capacity_factor * gate.config.top_k * pool / gate.num_experts), pool)
    experts_of = [[] for _ in probs]
    for start in range(0, len(probs), pool):
        for e in range(gate.num_experts):
            ranked = sorted(range(start, min(start + pool, len(probs))), key=lambda t, e=e: (-probs[t][e].item(), t))
            for t in ranked[:capacity]:
                experts_of[t].append(e)
    for t, chosen in enumerate(experts_of):
        chosen.sort(key=lambda e, t=t: (-probs[t][e].item(), e))
    width = max([len(chosen) for chosen in experts_of] + [1])
    weights = []
    for p, chosen in zip(probs, experts_of):
        picked = [p[e] for e in chosen] + [p.new_zeros(())] * (width - len(chosen))
        weights.append(torch.stack(picked))
    return [chosen + [-1] * (width - len(chosen)) for chosen in experts_of], rows(weights, width), {}


@pytest.mark.parametrize(("top_k", "factor"), [(1, 1.0), (2, 1.0), (2, 0.4), (6, 1.0), (6, 9.0)])
@pytest.mark.parametrize("case", CASES)
def test_formula(case: str, top_k: int, factor: float):
    gate, x = make("expert_choice", case, top_k=top_k, capacity_factor=factor)
    compare(gate, x, expert_choice)


def test_each_sequence_is_a_pool_of_its_own():
    gate, x = make("expert_choice", num_tokens=12, pool="sequence")
    out = compare(gate, x, lambda gate, x: expert_choice(gate, x, 4), TokenContext(sequence_length=4))
    alone = gate(x[4:8], TokenContext(sequence_length=4))
    chosen = [[e for e in row if e >= 0] for row in out.ids_TK[4:8].tolist()]
    assert chosen == [[e for e in row if e >= 0] for row in alone.ids_TK.tolist()]


def test_gradients_numerically():
    check_numerically(*make("expert_choice"))


@pytest.mark.parametrize("pad", [False, True])
def test_layer(pad: bool):
    torch.manual_seed(0)
    layer = MoELayer(5, 4, 6, ExpertChoiceGateConfig(top_k=2, pad_to_capacity=pad, fp32=False)).double()
    x = torch.randn(18, 5, dtype=torch.float64)
    ids, weights, _ = expert_choice(layer.gate, x)
    torch.testing.assert_close(layer(x), moe_by_loop(x, ids, weights, all_experts(layer)))
    assert layer.last_stats.tokens_per_expert_E.tolist() == [9, 9, 9, 9]
    assert layer.last_stats.num_dropped == 0


def test_masked_tokens_are_not_picked():
    gate, x = make("expert_choice")
    valid = torch.arange(13) >= 10
    out = gate(x, TokenContext(valid_T=valid))
    assert (out.ids_TK[~valid] == -1).all()
    assert (out.ids_TK[valid] >= 0).all(), "5 places for 3 tokens: everyone is picked by everyone"


def test_rules():
    with pytest.raises(ConfigError, match="capacity_factor=null"):
        build_gate(ExpertChoiceGateConfig(capacity_factor=None), 4, 4)
    with pytest.raises(ConfigError, match="do not come in sequences"):
        build_gate(ExpertChoiceGateConfig(pool="sequence"), 4, 4)(torch.randn(3, 4))
    with pytest.raises(ConfigError, match="pad_to_capacity"):
        build_gate(ExpertChoiceGateConfig(pool="sequence", pad_to_capacity=True), 4, 4)
