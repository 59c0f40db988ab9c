"""Soft MoE against its equations, slot by slot and token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeflow.models.init import initialize
from moeflow.moe import MoELayer
from moeflow.schema.gate import SoftGateConfig
from tests.moe.reference import all_experts, gradients


def make_layer(num_experts: int = 3, slots: int = 2) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(4, num_experts, 6, SoftGateConfig(slots_per_expert=slots, fp32=False), "gelu", d_out=5).double()
    with torch.no_grad():
        layer.gate.slots_MD.normal_()
        layer.gate.scale.fill_(3.0)
    return layer


def soft_by_loop(layer: MoELayer, x: Tensor, valid: Tensor | None = None) -> Tensor:
    """One sequence [S, D]."""
    gate, experts = layer.gate, all_experts(layer)
    per_expert = gate.config.slots_per_expert
    slots = [gate.scale * s / s.norm() for s in gate.slots_MD]
    logits = torch.stack([torch.stack([(row / row.norm()) @ s for s in slots]) for row in x])
    outs = []
    for m in range(len(slots)):
        weigh = logits[:, m].exp()
        if valid is not None:
            weigh = weigh * valid
        mean = sum(w * row for w, row in zip(weigh / weigh.sum(), x))
        outs.append(experts[m // per_expert](mean))
    return torch.stack([sum(c * o for c, o in zip(row.exp() / row.exp().sum(), outs)) for row in logits])


@pytest.mark.parametrize(("num_experts", "slots"), [(1, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("shape", [(7, 4), (2, 3, 4), (3, 1, 4), (2, 2, 3, 4)])
def test_equations(shape: tuple[int, ...], num_experts: int, slots: int):
    layer = make_layer(num_experts, slots)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    sequences = [x] if len(shape) == 2 else [s.reshape(-1, 4) for s in x]
    expected = torch.stack([soft_by_loop(layer, s) for s in sequences]).view(*shape[:-1], 5)
    y = layer(x)
    torch.testing.assert_close(y, expected)
    upstream = torch.randn_like(y)
    tensors = [x, *layer.parameters()]
    for ours, theirs in zip(gradients(y, upstream, tensors), gradients(expected, upstream, tensors)):
        torch.testing.assert_close(ours, theirs)


def test_gradients_numerically():
    layer = make_layer()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    slots, scale = layer.gate.slots_MD.detach().clone(), layer.gate.scale.detach().clone()

    def run(x: Tensor, slots: Tensor, scale: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"gate.slots_MD": slots, "gate.scale": scale}, (x,))

    assert torch.autograd.gradcheck(run, (x, slots.requires_grad_(), scale.requires_grad_()))


@pytest.mark.parametrize("shape", [(0, 4), (0, 3, 4)])
def test_no_tokens(shape: tuple[int, ...]):
    layer = make_layer()
    y = layer(torch.randn(shape, dtype=torch.float64, requires_grad=True))
    assert y.shape == (*shape[:-1], 5)
    y.sum().backward()
    assert layer.experts.w_in.grad is not None


def test_every_expert_has_the_same_rows():
    layer = make_layer()
    layer(torch.randn(4, 9, 4, dtype=torch.float64))
    assert layer.last_stats.tokens_per_expert_E.tolist() == [8, 8, 8]
    assert layer.last_stats.num_dropped == 0


def test_masked_tokens_feed_no_slot():
    layer = make_layer()
    x = torch.randn(6, 4, dtype=torch.float64)
    mask = torch.tensor([0, 1, 0, 0, 1, 0])
    y = layer(x, mask=mask)
    expected = soft_by_loop(layer, x, mask == 0)
    torch.testing.assert_close(y[mask == 0], expected[mask == 0])
    assert y[mask == 1].abs().sum() == 0
    assert layer(x, mask=torch.ones(6)).abs().sum() == 0


def test_initial_values():
    layer = MoELayer(64, 16, 8, SoftGateConfig(slots_per_expert=4))
    initialize(layer, 0)
    assert layer.gate.slots_MD.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert layer.gate.scale.item() == 1.0
