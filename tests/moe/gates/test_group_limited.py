"""Group-limited top-k, and the selection bias, against loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moeflow.errors import ConfigError
from moeflow.moe import MoELayer
from moeflow.moe.gates import AuxFreeGate, Gate, after_step, build_gate
from moeflow.schema.gate import AuxFreeGateConfig, GroupLimitedGateConfig
from tests.moe.gates.statement import CASES, balance, check_numerically, choose, compare, linear, make, rows, softmax


def grouped(gate: Gate, x: Tensor):
    config = gate.config
    sigmoid = config.score == "sigmoid"
    scores = [1 / (1 + (-row).exp()) if sigmoid else softmax(row) for row in linear(gate, x)]
    bias = gate.selection_bias_E.tolist() if isinstance(gate, AuxFreeGate) else [0.0] * gate.num_experts
    size, ids = gate.num_experts // config.num_groups, []
    for row in scores:
        by = [s + b for s, b in zip(row.tolist(), bias)]
        groups = [
            sum(sorted(by[g * size : (g + 1) * size], reverse=True)[: config.group_score_k])
            for g in range(config.num_groups)
        ]
        best = sorted(range(config.num_groups), key=lambda g: (-groups[g], g))[: config.top_groups]
        may = [e if e // size in best else None for e in range(gate.num_experts)]
        ids.append(choose(torch.tensor([-9.0 if m is None else by[m] for m in may]), config.top_k))
    weights = [s[chosen] / s[chosen].sum() * config.scaling for s, chosen in zip(scores, ids)]
    losses = {}
    if config.load_balance_coef:
        probs = [s / s.sum() for s in scores]
        losses["load_balance"] = balance(probs, ids, gate.num_experts, config.top_k)
    return ids, rows(weights, config.top_k), losses


@pytest.mark.parametrize(
    ("groups", "top_groups", "n"), [(3, 1, 1), (3, 2, 1), (3, 2, 2), (2, 1, 2), (6, 3, 1), (1, 1, 2)]
)
@pytest.mark.parametrize("case", CASES)
def test_formula(case: str, groups: int, top_groups: int, n: int):
    gate, x = make("group_limited", case, num_groups=groups, top_groups=top_groups, group_score_k=n)
    out = compare(gate, x, grouped)
    used = [{e // (6 // groups) for e in row} for row in out.ids_TK.tolist()]
    assert all(len(groups_of) <= top_groups for groups_of in used)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_aux_free_selects_by_the_bias_and_weighs_without_it(case: str, num_groups: int):
    gate, x = make(
        "aux_free", case, num_groups=num_groups, top_groups=min(2, num_groups), scaling=2.5, load_balance_coef=0.1
    )
    with torch.no_grad():
        gate.selection_bias_E.copy_(torch.linspace(-0.4, 0.3, 6))
    compare(gate, x, grouped)


def test_gradients_numerically():
    check_numerically(*make("group_limited", num_groups=3))
    gate, x = make("aux_free", load_balance_coef=0.5)
    check_numerically(gate, x)
    assert gate.selection_bias_E.grad is None


def test_all_of_the_experts():
    gate, x = make("group_limited", top_k=6, num_groups=3, top_groups=3)
    assert gate(x).ids_TK.sort(1).values.tolist() == [list(range(6))] * 13


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 4}, "does not divide model.num_experts=6"),
        ({"num_groups": 2, "top_groups": 3}, "more than gate.num_groups=2"),
        ({"num_groups": 6, "top_groups": 1}, "1 groups of 1 experts have only 1"),
        ({"num_groups": 3, "group_score_k": 3}, "more than the 2 experts of a group"),
    ],
)
def test_rules(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        build_gate(GroupLimitedGateConfig(**options), 4, 6)


# --- the bias --------------------------------------------------------------------------------------------------------


def test_bias_moves_towards_an_even_load():
    gate = build_gate(AuxFreeGateConfig(bias_update_rate=0.5), 4, 4)
    gate.update_bias(torch.tensor([10, 0, 5, 5]))
    assert gate.selection_bias_E.tolist() == [-0.5, 0.5, 0.0, 0.0]


def test_bias_is_updated_once_per_step_from_all_micro_batches_and_ranks():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(MoELayer(6, 4, 8, AuxFreeGateConfig(top_k=1)) for _ in range(2)))
    chosen = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
    for _ in range(3):
        model(torch.randn(20, 6))
        for layer, total in zip(model, chosen):
            total += layer.last_stats.tokens_per_expert_E
    model.eval()
    model(torch.randn(50, 6))
    model.train()
    assert [layer.gate.counts_E.tolist() for layer in model] == [total.tolist() for total in chosen]
    calls = []

    def reduce(counts: Tensor) -> Tensor:
        calls.append(counts.clone())
        return counts + torch.tensor([0, 100, 0, 0, 0, 0, 0, 100])  # another rank's

    after_step(model, reduce)
    assert len(calls) == 1, "one collective for all layers"
    for layer, total, extra in zip(model, chosen, (torch.tensor([0, 100, 0, 0]), torch.tensor([0, 0, 0, 100]))):
        load = (total + extra).float()
        torch.testing.assert_close(layer.gate.selection_bias_E, 0.001 * torch.sign(load.mean() - load))
        assert layer.gate.counts_E.sum() == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_does_not_count_twice(reentrant: bool):
    layer = MoELayer(6, 4, 8, AuxFreeGateConfig(top_k=2))
    x = torch.randn(20, 6, requires_grad=True)
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert layer.gate.counts_E.sum() == 40
    assert layer.experts.w_in.grad.abs().sum() > 0


def test_bias_stays_fp32():
    gate = build_gate(AuxFreeGateConfig(), 8, 4)
    gate.selection_bias_E.fill_(1.0 + 2**-20)
    gate = gate.bfloat16()
    assert gate.proj.weight.dtype == torch.bfloat16
    assert gate.selection_bias_E.tolist() == [1.0 + 2**-20] * 4
    assert gate.counts_E.dtype == torch.int64
    assert gate.to("meta").selection_bias_E.is_meta
    assert gate.to_empty(device="cpu").half().selection_bias_E.dtype == torch.float32


def test_bias_is_saved_and_the_counters_are_not():
    state = build_gate(AuxFreeGateConfig(), 8, 4).state_dict()
    assert set(state) == {"proj.weight", "selection_bias_E"}


def test_the_bias_evens_out_a_skewed_load():
    torch.manual_seed(0)
    layer = MoELayer(8, 8, 4, AuxFreeGateConfig(top_k=1, bias_update_rate=0.02))
    with torch.no_grad():
        layer.gate.proj.weight[2] += 0.5
    x = torch.rand(512, 8)
    layer(x)
    before = layer.last_stats.tokens_per_expert_E.max().item()
    for _ in range(150):
        layer(x)
        after_step(layer, lambda counts: counts)
    layer(x)
    assert before > 400
    assert layer.last_stats.tokens_per_expert_E.max().item() < 150
