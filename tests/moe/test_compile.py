"""torch.compile: one graph through gate, dispatch and combine, with the same results."""

from __future__ import annotations

import pytest
import torch

from moeflow.moe import DenseMLP, MoELayer, SharedExperts
from moeflow.schema.gate import GATES, GateConfig, NaiveGateConfig
from tests.moe.reference import gradients

# Sinkhorn iterates until it has converged, SWIPE moves single choices on the host, expert choice reads how many experts
# a token got: these three break the graph.
ONE_GRAPH = [name for name in GATES if name not in ("sinkhorn", "swipe", "expert_choice")]


def make(gate: GateConfig, **options) -> tuple[MoELayer, torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return MoELayer(8, 8, 16, gate, **options), torch.randn(2, 10, 8, requires_grad=True)


def assert_same(layer: MoELayer, compiled, x: torch.Tensor, exact: bool = True) -> None:
    results = []
    for run in (layer, compiled):
        torch.manual_seed(1)
        layer.last_stats = None
        y = run(x)
        upstream = torch.linspace(-1, 1, y.numel()).view_as(y)
        assert layer.last_stats is not None
        counts = layer.last_stats.tokens_per_expert_E.clone().float()
        results.append([y, counts, *gradients(y, upstream, [x, *(p for p in layer.parameters() if p.requires_grad)])])
    for plain, graph in zip(*results):
        torch.testing.assert_close(graph, plain, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_one_graph_and_the_same_results(name: str):
    layer, x = make(GATES[name]())
    assert_same(layer, torch.compile(layer, fullgraph=True, backend="aot_eager"), x)


@pytest.mark.parametrize("pad", [False, True])
def test_capacity_and_shared_experts(pad: bool):
    gate = NaiveGateConfig(capacity_factor=0.7, pad_to_capacity=pad, renormalize="after", z_loss_coef=0.1)
    layer, x = make(gate, activation="swiglu", shared=SharedExperts(DenseMLP(8, 8), 8, gated=True))
    assert_same(layer, torch.compile(layer, fullgraph=True, backend="aot_eager"), x)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(GATES) - set(ONE_GRAPH)))
def test_gates_that_break_the_graph_still_run(name: str):
    layer, x = make(GATES[name]())
    assert_same(layer, torch.compile(layer, backend="aot_eager"), x)


def test_other_numbers_of_tokens_do_not_break_the_graph():
    layer, _ = make(NaiveGateConfig())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for num_tokens in (4, 9, 30):
        assert_same(layer, compiled, torch.randn(num_tokens, 8, requires_grad=True))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_inductor():
    layer, x = make(NaiveGateConfig())
    assert_same(layer, torch.compile(layer, fullgraph=True), x, exact=False)
