"""Gates without parameters: zero and hash."""

from __future__ import annotations

import pytest
import torch

from moeflow.moe import MoELayer
from moeflow.moe.gates import TokenContext, build_gate
from moeflow.schema.gate import HashGateConfig, ZeroGateConfig
from tests.moe.reference import all_experts, moe_by_loop


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_zero_gate(top_k: int, num_tokens: int):
    layer = MoELayer(3, 4, 5, ZeroGateConfig(top_k=top_k))
    x = torch.randn(num_tokens, 3, requires_grad=True)
    y = layer(x)
    ids, weights = [list(range(top_k))] * num_tokens, torch.full((num_tokens, top_k), 1 / top_k)
    torch.testing.assert_close(y, moe_by_loop(x, ids, weights, all_experts(layer)))
    assert layer.last_stats.tokens_per_expert_E.tolist() == [num_tokens] * top_k + [0] * (4 - top_k)
    assert list(layer.gate.parameters()) == []
    y.sum().backward()
    assert layer.last_stats.losses == {}


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 1), (8, 3), (7, 7), (12, 12)])
def test_hash_depends_on_the_id_alone(num_experts: int, top_k: int):
    gate = build_gate(HashGateConfig(top_k=top_k), 4, num_experts)
    ids = torch.randint(0, 50_000, (200,))
    chosen = gate(torch.randn(200, 4), TokenContext(token_ids_T=ids)).ids_TK
    shuffled = torch.randperm(200)
    again = gate(torch.randn(200, 4), TokenContext(token_ids_T=ids[shuffled])).ids_TK
    assert torch.equal(again, chosen[shuffled])
    assert ((chosen >= 0) & (chosen < num_experts)).all()
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    assert torch.equal(build_gate(HashGateConfig(top_k=top_k), 4, num_experts).experts_of(ids), chosen)


def test_hash_formula():
    gate = build_gate(HashGateConfig(top_k=3, hash_seed=5), 4, 9)
    (a, b), (c, d) = gate._factors
    strides = [1, 2, 4, 5, 7, 8]
    for token in (0, 1, 7, 50_256, 2**40 + 3):
        first = (a * (token % (2**31 - 1)) + b) % (2**31 - 1)
        stride = strides[(c * (token % (2**31 - 1)) + d) % (2**31 - 1) % 6]
        expected = [(first + k * stride) % 9 for k in range(3)]
        assert gate.experts_of(torch.tensor([token])).tolist() == [expected]


def test_hash_spreads_a_vocabulary():
    counts = build_gate(HashGateConfig(), 4, 16).experts_of(torch.arange(50_000)).flatten().bincount(minlength=16)
    assert (counts / 50_000 * 16 - 1).abs().max() < 0.05
    other = build_gate(HashGateConfig(hash_seed=1), 4, 16).experts_of(torch.arange(50_000))
    assert (other == build_gate(HashGateConfig(), 4, 16).experts_of(torch.arange(50_000))).float().mean() < 0.15


def test_position_stands_in_for_a_missing_id():
    gate = build_gate(HashGateConfig(), 4, 8)
    x = torch.randn(12, 4)
    in_sequences = gate(x, TokenContext(sequence_length=4)).ids_TK.view(3, 4)
    assert torch.equal(in_sequences[0], in_sequences[1])
    assert torch.equal(in_sequences[0], gate.experts_of(torch.arange(4)).flatten())
    assert torch.equal(gate(x).ids_TK, gate.experts_of(torch.arange(12)))


def test_ids_reach_the_gate_through_the_layer():
    layer = MoELayer(4, 8, 6, HashGateConfig(top_k=2))
    x, ids = torch.randn(2, 5, 4), torch.randint(0, 100, (2, 5))
    y = layer(x, token_ids=ids)
    chosen = layer.gate.experts_of(ids.flatten()).tolist()
    expected = moe_by_loop(x.view(10, 4), chosen, torch.full((10, 2), 0.5), all_experts(layer))
    torch.testing.assert_close(y.view(10, 4), expected)
