"""Options of the layer: masks, hooks, shared experts, several inputs, padding, renormalization after drops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moeflow.errors import ConfigError
from moeflow.moe import DenseMLP, LocalDispatcher, MoELayer, ResidualExperts, SharedExperts
from moeflow.moe.gates import GateOutput
from moeflow.schema.gate import GATES, ExpertChoiceGateConfig, NaiveGateConfig, SwitchGateConfig
from tests.moe.reference import gradients

PLAIN = NaiveGateConfig(load_balance_coef=0.0)


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GATES)
def test_masked_tokens_skip_the_experts(name: str):
    torch.manual_seed(0)
    layer = MoELayer(4, 4, 6, GATES[name](), mask_values={1: torch.arange(4.0), 2: 7.0}).eval()
    x = torch.randn(2, 6, 4, requires_grad=True)
    mask = torch.tensor([[0, 1, 0, 2, 3, 0], [0, 0, 0, 0, 0, 2]])
    y = layer(x, mask=mask)
    assert torch.equal(y[mask == 1], torch.arange(4.0)[None])
    assert (y[mask == 2] == 7).all()
    assert (y[mask == 3] == 0).all()
    y.backward(torch.randn_like(y))
    assert x.grad[mask != 0].abs().sum() == 0
    assert x.grad[mask == 0].abs().sum() > 0
    if name not in ("soft", "expert_choice"):
        assert layer.last_stats.tokens_per_expert_E.sum() <= 8 * layer.gate.top_k


def test_unmasked_tokens_are_as_without_a_mask():
    torch.manual_seed(0)
    layer = MoELayer(4, 4, 6, PLAIN)
    x, mask = torch.randn(20, 4), torch.arange(20) % 3 == 0
    torch.testing.assert_close(layer(x, mask=mask)[~mask], layer(x[~mask]))
    assert torch.equal(layer(x, mask=torch.zeros(20)), layer(x))


def test_shared_experts_skip_masked_tokens_too():
    layer = MoELayer(4, 4, 6, PLAIN, shared=SharedExperts(DenseMLP(4, 8), 4))
    assert layer(torch.randn(5, 4), mask=torch.ones(5)).abs().sum() == 0


# --- hooks -----------------------------------------------------------------------------------------------------------


def test_hook_sees_what_the_gate_decided():
    seen = []
    layer = MoELayer(4, 4, 6, PLAIN, gate_hook=seen.append)
    plain = MoELayer(4, 4, 6, PLAIN)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(7, 4)
    assert torch.equal(layer(x), plain(x))
    assert len(seen) == 1
    assert torch.equal(seen[0].ids_TK, plain.gate(x).ids_TK)


def test_hook_may_replace_the_choices():
    def replay(out: GateOutput) -> GateOutput:
        return replace(out, ids_TK=torch.full_like(out.ids_TK, 3).index_fill(1, torch.tensor([1]), -1))

    layer = MoELayer(4, 4, 6, PLAIN, gate_hook=replay)
    layer(torch.randn(7, 4))
    assert layer.last_stats.tokens_per_expert_E.tolist() == [0, 0, 0, 7]


# --- shared experts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts(gated: bool, activation: str):
    torch.manual_seed(0)
    shared = SharedExperts(DenseMLP(4, 6, 4, activation), 4, gated)
    layer = MoELayer(4, 3, 5, PLAIN, shared=shared)
    x = torch.randn(9, 4)
    y = layer(x)
    hidden = shared.mlp.fc_in(x)
    hidden = functional.silu(hidden[:, :6]) * hidden[:, 6:] if activation == "swiglu" else functional.gelu(hidden)
    added = shared.mlp.fc_out(hidden)
    if gated:
        added = added * torch.sigmoid(x @ shared.gate.weight.t())
    layer.shared = None
    torch.testing.assert_close(y, layer(x) + added)


def test_residual_experts():
    torch.manual_seed(0)
    residual = ResidualExperts(DenseMLP(4, 6), 4)
    layer = MoELayer(4, 3, 5, PLAIN, shared=residual)
    x = torch.randn(2, 5, 4)
    y = layer(x)
    share = torch.softmax(residual.coefficient(x), -1)
    layer.shared = None
    torch.testing.assert_close(
        y, layer(x) * share[..., :1] + residual.mlp(x.view(10, 4)).view(2, 5, 4) * share[..., 1:]
    )


# --- several inputs --------------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.a, self.b = nn.Linear(d_model, 3), nn.Linear(2, 3)

    def forward(self, tree: dict) -> dict:
        mixed = torch.tanh(self.a(tree["x"]) + self.b(tree["more"][0]))
        return {"sum": mixed, "pair": (mixed * 2, tree["more"][1])}


@pytest.mark.parametrize("experts", [TwoInputs, [TwoInputs] * 4])
def test_nested_inputs_go_through_the_experts(experts):
    torch.manual_seed(0)
    layer = MoELayer(4, 4, gate=PLAIN, experts=experts)
    tree = {"x": torch.randn(3, 5, 4), "more": [torch.randn(3, 5, 2), torch.randn(3, 5, 1)]}
    y = layer(tree)
    assert (y["sum"].shape, y["pair"][0].shape, y["pair"][1].shape) == ((3, 5, 3), (3, 5, 3), (3, 5, 1))
    torch.testing.assert_close(y["pair"][0], 2 * y["sum"])
    torch.testing.assert_close(y["pair"][1], tree["more"][1])  # weights sum to one
    x, more = tree["x"].view(15, 4), tree["more"][0].view(15, 2)
    weights, ids = torch.softmax(x @ layer.gate.proj.weight.t(), 1).topk(2, 1)
    weights = weights / weights.sum(1, keepdim=True)
    functions = layer.experts.callables()
    for t in (0, 7, 14):
        expected = sum(
            w * functions[e]({"x": x[t : t + 1], "more": [more[t : t + 1], more[t : t + 1, :1]]})["sum"][0]
            for w, e in zip(weights[t], ids[t].tolist())
        )
        torch.testing.assert_close(y["sum"].view(15, 3)[t], expected, rtol=1e-5, atol=1e-6)
    (y["sum"].sum() + y["pair"][0].sum()).backward()
    assert all(p.grad is not None for p in layer.experts.parameters())


def test_losses_of_nested_inputs_reach_the_gate():
    layer = MoELayer(4, 4, gate=NaiveGateConfig(load_balance_coef=1.0), experts=TwoInputs)
    x = torch.randn(15, 4)
    y = layer({"x": x, "more": [torch.randn(15, 2), torch.randn(15, 1)]})
    y["sum"].backward(torch.zeros_like(y["sum"]))
    assert layer.gate.proj.weight.grad.abs().sum() > 0


# --- padding and weights after drops ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [0, 5, 40])
@pytest.mark.parametrize("gate", [SwitchGateConfig(jitter=0.0), NaiveGateConfig(capacity_factor=0.6), "gshard"])
def test_padding_changes_nothing(gate, num_tokens: int):
    torch.manual_seed(0)
    gate = GATES[gate]() if isinstance(gate, str) else gate
    layer = MoELayer(4, 4, 6, gate)
    padded = MoELayer(4, 4, 6, replace(gate, pad_to_capacity=True))
    padded.load_state_dict(layer.state_dict())
    x, upstream = torch.randn(num_tokens, 4, requires_grad=True), torch.randn(num_tokens, 4)
    results = []
    for one in (layer, padded):
        torch.manual_seed(1)
        y = one(x)
        results.append([y, *gradients(y, upstream, [x, *one.parameters()])])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs)


def test_padding_makes_shapes_static():
    shapes = []

    class Watching(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            shapes.append(tuple(rows.shape))
            return rows

    layer = MoELayer(
        4, 4, gate=NaiveGateConfig(capacity_factor=1.0, pad_to_capacity=True), experts=[lambda d: Watching()] * 4
    )
    for _ in range(3):
        layer(torch.randn(16, 4))
    assert shapes == [(8, 4)] * 12


def test_renormalization_after_drops():
    torch.manual_seed(0)
    layer = MoELayer(
        4, 4, gate=NaiveGateConfig(capacity_factor=0.5, renormalize="after"), experts=lambda d: nn.Identity()
    )
    x = torch.randn(40, 4)
    y = layer(x)
    assert layer.last_stats.num_dropped > 0
    kept = (y != 0).any(1)
    torch.testing.assert_close(y[kept], x[kept])  # whatever is kept of a token has weight one in all


@pytest.mark.parametrize("name", GATES)
def test_every_gate_trains_and_evaluates(name: str):
    torch.manual_seed(0)
    layer = MoELayer(8, 8, 16, name)
    for training in (True, False):
        y = layer.train(training)(torch.randn(2, 9, 8))
        assert y.shape == (2, 9, 8)
        assert y.isfinite().all()
    y.sum().backward()
    assert all(p.grad is not None for p in layer.experts.parameters())


@pytest.mark.parametrize("gate", ["soft", "hash", ExpertChoiceGateConfig(pool="sequence")])
def test_gates_that_need_whole_sequences_say_so(gate):
    class Shared(LocalDispatcher):
        token_ranks = 2

    layer = MoELayer(4, 4, 8, gate)
    layer.dispatcher = Shared()
    with pytest.raises(ConfigError, match=r"needs whole sequences"):
        layer(torch.randn(2, 6, 4))
    if gate == "hash":
        layer(torch.randn(2, 6, 4), token_ids=torch.arange(12).view(2, 6))


def test_no_experts_is_refused():
    with pytest.raises(ConfigError, match="at least one expert"):
        MoELayer(4, 0)
