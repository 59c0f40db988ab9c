"""The topology-aware gate: the limit holds exactly, over all slots."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moeflow.errors import ConfigError
from moeflow.moe import MoELayer
from moeflow.moe.gates import Gate, TokenContext
from moeflow.schema.gate import TopologyGateConfig
from tests.moe.gates.statement import CASES, balance, check_numerically, choose, compare, linear, make, rows, softmax

NODES = [0, 0, 1, 1, 2, 2]


def topology(gate: Gate, x: Tensor):
    k, share = gate.top_k, gate.share
    nodes, own = gate.node_of_expert_E.tolist(), gate.own_node
    probs = [softmax(row) for row in linear(gate, x)]
    ids = [choose(row, k) for row in probs]
    if share is not None:
        leaving = [(t, j) for j in range(k) for t in range(len(ids)) if nodes[ids[t][j]] != own]
        leaving.sort(key=lambda tj: -probs[tj[0]][ids[tj[0]][tj[1]]].item())
        allowed = [set() for _ in ids]
        for t, j in leaving[: math.floor(share * len(ids) * k + 1e-9)]:
            allowed[t].add(ids[t][j])
        for t, row in enumerate(probs):
            may = [e for e in choose(row, gate.num_experts) if nodes[e] == own or e in allowed[t]]
            ids[t] = (may + [-1] * k)[:k]
    weights = []
    for p, chosen in zip(probs, ids):
        w = torch.stack([p[e] if e >= 0 else p.new_zeros(()) for e in chosen])
        weights.append(w / w.sum())
    counted = balance(probs, ids, gate.num_experts, k)
    return ids, rows(weights, k), {"load_balance": counted} if gate.training else {}


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("share", [None, 0.0, 0.14, 0.5, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_formula(case: str, share: float | None, top_k: int):
    gate, x = make("topology", case, top_k=top_k, outgoing_share=share)
    gate.place(NODES, 1)
    out = compare(gate, x, topology)
    if share is not None:
        away = (out.ids_TK >= 0) & (gate.node_of_expert_E[out.ids_TK] != 1)
        assert away.sum() <= math.floor(share * out.ids_TK.numel() + 1e-9)


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_the_limit_is_used_up_where_there_is_demand(share: float):
    gate, x = make("topology", num_tokens=200, outgoing_share=share)
    free = gate(x).ids_TK
    gate.place(NODES, 0)
    assert (torch.tensor(NODES)[free] != 0).sum() > share * 400
    ids = gate(x).ids_TK
    assert (torch.tensor(NODES)[ids] != 0).sum() == math.floor(share * 400 + 1e-9)
    assert (ids >= 0).all()


def test_gradients_numerically():
    gate, x = make("topology", outgoing_share=0.2)
    gate.place(NODES, 2)
    check_numerically(gate, x)


def test_everything_is_one_node_until_told_otherwise():
    gate, x = make("topology", outgoing_share=0.0)
    plain, _ = make("topology")
    plain.load_state_dict(gate.state_dict())
    assert torch.equal(gate(x).ids_TK, plain(x).ids_TK)
    assert gate.share == 0.0
    assert plain.share is None


def test_a_choice_without_an_expert_is_given_up_in_the_layer():
    torch.manual_seed(0)
    layer = MoELayer(4, 4, 8, TopologyGateConfig(top_k=2, outgoing_share=0.0))
    layer.gate.place([0, 1, 1, 1], 0)
    layer(torch.randn(9, 4))
    assert layer.last_stats.tokens_per_expert_E.tolist() == [9, 0, 0, 0]


def test_one_node_for_each_expert():
    gate, _ = make("topology")
    with pytest.raises(ConfigError, match="one for each of the 6 experts"):
        gate.place([0, 1], 0)


def test_masked_tokens_take_no_place():
    gate, x = make("topology", outgoing_share=0.2)
    gate.place(NODES, 1)
    valid = torch.arange(13) % 3 != 0
    out = gate(x, TokenContext(valid_T=valid))
    assert torch.equal(out.ids_TK[valid], gate(x[valid]).ids_TK)
    assert (out.ids_TK[~valid] == -1).all()
