"""MoELayer against a loop over tokens."""

from __future__ import annotations

import copy

import pytest
import torch

from moeflow.errors import ConfigError
from moeflow.moe import MoELayer
from moeflow.schema.gate import NaiveGateConfig
from tests.moe.reference import all_experts, gradients, moe_by_loop, top_k_by_sorting


def naive_by_loop(layer: MoELayer, x: torch.Tensor, k: int) -> torch.Tensor:
    """Softmax over the k largest logits of each token, then the experts."""
    logits = x @ layer.gate.proj.weight.t()
    ids = [top_k_by_sorting(row, k) for row in logits.tolist()]
    weights = [torch.softmax(logits[t, chosen], 0) for t, chosen in enumerate(ids)]
    stacked = torch.stack(weights) if weights else x.new_zeros(0, k)
    return moe_by_loop(x, ids, stacked, all_experts(layer))


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 257])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 1), (4, 2), (4, 3), (8, 1), (8, 2), (8, 3)])
def test_layer_is_a_loop_over_tokens(num_experts: int, top_k: int, num_tokens: int):
    torch.manual_seed(num_tokens + 10 * num_experts + top_k)
    gate = NaiveGateConfig(top_k=top_k, load_balance_coef=0.0)
    layer = MoELayer(6, num_experts, 10, gate, activation="relu", d_out=5)
    x = torch.randn(num_tokens, 6, requires_grad=True)
    upstream = torch.randn(num_tokens, 5)
    tensors = [x, *layer.parameters()]
    y = layer(x)
    expected = naive_by_loop(layer, x, top_k)
    assert y.shape == (num_tokens, 5)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    y.backward(upstream)
    for tensor, grad in zip(tensors, gradients(expected, upstream, tensors)):
        assert tensor.grad is not None, "an idle expert has a zero gradient, not a missing one"
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_kinds_of_experts(activation: str, bias: bool):
    torch.manual_seed(0)
    layer = MoELayer(6, 4, 8, NaiveGateConfig(load_balance_coef=0.0), activation, bias=bias).double()
    layer.gate.config.fp32 = False
    x = torch.randn(20, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), naive_by_loop(layer, x, 2))


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (2, 3, 2, 6), (0, 4, 6)])
def test_leading_dimensions_are_tokens(shape: tuple[int, ...]):
    layer = MoELayer(6, 4, 8, d_out=3)
    x = torch.randn(shape)
    y = layer(x)
    assert y.shape == (*shape[:-1], 3)
    torch.testing.assert_close(y.reshape(-1, 3), layer(x.reshape(-1, 6)))


def test_all_tokens_on_one_expert():
    torch.manual_seed(0)
    layer = MoELayer(4, 8, 8, NaiveGateConfig(top_k=1, load_balance_coef=0.0), activation="gelu")
    with torch.no_grad():
        layer.gate.proj.weight.zero_()
        layer.gate.proj.weight[5] = 10.0
    x = torch.rand(33, 4)
    y = layer(x)
    torch.testing.assert_close(y, naive_by_loop(layer, x, 1), rtol=1e-5, atol=1e-6)
    assert layer.last_stats.tokens_per_expert_E.tolist() == [0, 0, 0, 0, 0, 33, 0, 0]
    y.sum().backward()
    idle = [e for e in range(8) if e != 5]
    assert layer.experts.w_in.grad[idle].abs().sum() == 0
    assert layer.experts.w_in.grad[5].abs().sum() > 0


@pytest.mark.parametrize("policy", ["position", "probability"])
def test_dropped_choices_add_nothing(policy: str):
    torch.manual_seed(1)
    gate = NaiveGateConfig(top_k=2, capacity_factor=0.5, drop_policy=policy, load_balance_coef=0.0)
    layer = MoELayer(5, 4, 6, gate)
    x = torch.randn(40, 5)
    logits = x @ layer.gate.proj.weight.t()
    ids = [top_k_by_sorting(row, 2) for row in logits.tolist()]
    weights = torch.stack([torch.softmax(logits[t, chosen], 0) for t, chosen in enumerate(ids)])
    order = [(t, k) for k in range(2) for t in range(40)]
    if policy == "probability":
        order.sort(key=lambda tk: -weights[tk].item())
    room, kept = [10] * 4, [[-1, -1] for _ in ids]  # capacity ceil(0.5 * 2 * 40 / 4)
    for t, k in order:
        if room[ids[t][k]] > 0:
            room[ids[t][k]] -= 1
            kept[t][k] = ids[t][k]
    torch.testing.assert_close(layer(x), moe_by_loop(x, kept, weights, all_experts(layer)), rtol=1e-5, atol=1e-6)
    dropped = sum(e < 0 for row in kept for e in row)
    assert 0 < dropped == layer.last_stats.num_dropped


def test_capacity_zero_drops_all(monkeypatch: pytest.MonkeyPatch):
    layer = MoELayer(4, 4, 8, "naive")
    monkeypatch.setattr(layer.gate, "capacity", lambda num_tokens: 0)
    x = torch.randn(7, 4, requires_grad=True)
    y = layer(x)
    assert y.abs().sum() == 0
    y.backward(torch.randn_like(y))
    assert layer.experts.w_in.grad.abs().sum() == 0
    assert layer.last_stats.num_dropped == 14


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_auxiliary_loss_reaches_the_gradient_with_its_scale(scale: float):
    torch.manual_seed(0)
    layer = MoELayer(6, 4, 8, NaiveGateConfig(load_balance_coef=0.3, z_loss_coef=0.2))
    plain = copy.deepcopy(layer)
    plain.gate.config = NaiveGateConfig(load_balance_coef=0.0)
    layer.aux_loss_scale = scale
    x, upstream = torch.randn(30, 6), torch.randn(30, 6)
    y, y_plain = layer(x), plain(x)
    assert torch.equal(y, y_plain), "the loss does not change the output"
    y.backward(upstream)
    logits = x @ plain.gate.proj.weight.t()
    probs = torch.softmax(logits, 1)
    share = torch.bincount(probs.topk(2, 1).indices.flatten(), minlength=4) / 60
    loss = 0.3 * 4 * (share * probs.mean(0)).sum() + 0.2 * torch.logsumexp(logits, 1).square().mean()
    (y_plain * upstream).sum().add(scale * loss).backward()
    torch.testing.assert_close(layer.gate.proj.weight.grad, plain.gate.proj.weight.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer.experts.w_in.grad, plain.experts.w_in.grad)


def test_no_auxiliary_loss_in_evaluation():
    layer = MoELayer(4, 4, 8, NaiveGateConfig(load_balance_coef=1.0)).eval()
    layer(torch.randn(9, 4))
    assert layer.last_stats.losses == {}


def test_autocast_keeps_the_gate_in_fp32():
    torch.manual_seed(0)
    layer = MoELayer(16, 8, 32, NaiveGateConfig(top_k=2, load_balance_coef=0.0))
    x = torch.randn(64, 16)
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = layer(x)
        out = layer.gate(x)
    assert half.dtype == torch.bfloat16
    assert out.weights_TK.dtype == torch.float32
    torch.testing.assert_close(out.ids_TK, layer.gate(x).ids_TK)
    torch.testing.assert_close(half.float(), exact, rtol=0.05, atol=0.02)


def test_wrong_width_is_explained():
    with pytest.raises(ConfigError, match="d_model=4"):
        MoELayer(4, 2, 8)(torch.randn(3, 5))


def test_unknown_gate_suggests():
    with pytest.raises(ConfigError, match="Did you mean 'switch'"):
        MoELayer(4, 2, 8, "swich")
