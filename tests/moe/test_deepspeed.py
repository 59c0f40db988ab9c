"""MoELayer against DeepSpeed's MoE (its TopKGate and experts), with copied weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moeflow.moe import MoELayer
from moeflow.schema.gate import GateConfig, GShardGateConfig, NaiveGateConfig, SwitchGateConfig

pytest.importorskip("deepspeed", reason="DeepSpeed is the oracle here: pip install 'moeflow[deepspeed]'")

D, F, E, T = 10, 14, 6, 50


def gate_for(k: int, **options) -> GateConfig:
    """The gate that states DeepSpeed's rules for this k."""
    if k == 1:  # raw probability, balance over the choice
        return SwitchGateConfig(jitter=0.0, eval_capacity_factor=None, load_balance_coef=1.0, **options)
    if k == 2:  # first choices first, weights over what is kept, balance over first choices
        return GShardGateConfig(
            random_second=False, renormalize="after", eval_capacity_factor=None, load_balance_coef=1.0, **options
        )
    return NaiveGateConfig(  # the most probable are kept, balance over all choices
        top_k=k, drop_policy="probability", renormalize="after", load_balance_coef=1.0, **options
    )


def build(k: int, capacity_factor: float | None, min_capacity: int = 0) -> tuple[nn.Module, MoELayer]:
    from deepspeed.moe.layer import MoE

    torch.manual_seed(k)
    expert = nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))
    theirs = MoE(
        D, expert, E, k=k, capacity_factor=capacity_factor or 1.0, min_capacity=min_capacity,
        drop_tokens=capacity_factor is not None, use_rts=False, top2_2nd_expert_sampling=False,
    )  # fmt: skip
    gate = gate_for(k, capacity_factor=capacity_factor, min_capacity=min_capacity)
    layer = MoELayer(D, E, F, gate, "gelu")
    with torch.no_grad():
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.5)
        layer.gate.proj.weight.copy_(theirs.deepspeed_moe.gate.wg.weight)
        for e, module in enumerate(theirs.deepspeed_moe.experts.deepspeed_experts):
            layer.experts.w_in[e], layer.experts.b_in[e] = module[0].weight, module[0].bias
            layer.experts.w_out[e], layer.experts.b_out[e] = module[2].weight, module[2].bias
    return theirs, layer


def kept_by(theirs: nn.Module, x: Tensor) -> Tensor:
    """Experts of each token after DeepSpeed's capacity: [T, K], -1 where dropped."""
    return theirs.deepspeed_moe.gate(x, None, True)[3].t().long()


def assert_same(theirs: nn.Module, layer: MoELayer, x: Tensor) -> None:
    """Output, loss, and the gradients of both."""
    ours, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    upstream = torch.randn(T, D)
    y = layer(ours)
    expected, aux, _ = theirs(other)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.last_stats.losses["load_balance"], aux.detach())
    y.backward(upstream)
    ((expected * upstream).sum() + aux).backward()
    torch.testing.assert_close(ours.grad, other.grad, rtol=1e-5, atol=1e-5)
    wg = theirs.deepspeed_moe.gate.wg.weight
    torch.testing.assert_close(layer.gate.proj.weight.grad, wg.grad, rtol=1e-5, atol=1e-4)
    for e, module in enumerate(theirs.deepspeed_moe.experts.deepspeed_experts):
        for mine, parameter in (
            (layer.experts.w_in, module[0].weight),
            (layer.experts.b_in, module[0].bias),
            (layer.experts.w_out, module[2].weight),
            (layer.experts.b_out, module[2].bias),
        ):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(mine.grad[e], grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_without_capacity(k: int):
    theirs, layer = build(k, None)
    assert_same(theirs, layer, torch.randn(T, D))


@pytest.mark.parametrize("factor", [0.4, 1.0, 1.3])
@pytest.mark.parametrize("k", [2, 3])
def test_with_capacity(k: int, factor: float):
    theirs, layer = build(k, factor)
    x = torch.randn(T, D)
    assert_same(theirs, layer, x)
    dropped = (kept_by(theirs, x) < 0).sum()
    assert dropped == layer.last_stats.num_dropped
    assert dropped > 0 or factor > 1


@pytest.mark.parametrize("factor", [0.4, 1.0])
def test_top1_with_capacity(factor: float):
    theirs, layer = build(1, factor)
    x = torch.randn(T, D)
    # Without random token selection DeepSpeed keeps whichever tokens torch.topk finds first among equals, so which
    # tokens stay is its own; how many stay is not, and neither is what comes out for the same tokens.
    kept = kept_by(theirs, x)
    layer(x)
    assert (kept < 0).sum() == layer.last_stats.num_dropped > 0
    layer.gate.config = replace(layer.gate.config, capacity_factor=None, load_balance_coef=0.0)
    layer.gate_hook = lambda out: replace(out, ids_TK=kept)
    ours, other, upstream = x.clone().requires_grad_(), x.clone().requires_grad_(), torch.randn(T, D)
    y, (expected, _, _) = layer(ours), theirs(other)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    y.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(ours.grad, other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(("factor", "least"), [(0.1, 5), (1.3, 0), (1.0, 4)])
def test_capacity_formula(k: int, factor: float, least: int):
    theirs, layer = build(k, factor, least)
    capacity = theirs.deepspeed_moe.gate(torch.randn(T, D), None, True)[1]
    assert layer.gate.capacity(T) == int(capacity)


def test_residual_moe():
    from deepspeed.moe.layer import MoE

    from moeflow.moe import DenseMLP, ResidualExperts

    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(D, F), nn.GELU(), nn.Linear(F, D))
    theirs = MoE(D, expert, E, k=2, drop_tokens=False, use_residual=True, top2_2nd_expert_sampling=False)
    layer = MoELayer(D, E, F, gate_for(2, capacity_factor=None), "gelu", shared=ResidualExperts(DenseMLP(D, F), D))
    with torch.no_grad():
        layer.gate.proj.weight.copy_(theirs.deepspeed_moe.gate.wg.weight)
        for e, module in enumerate(theirs.deepspeed_moe.experts.deepspeed_experts):
            layer.experts.w_in[e], layer.experts.b_in[e] = module[0].weight, module[0].bias
            layer.experts.w_out[e], layer.experts.b_out[e] = module[2].weight, module[2].bias
    layer.shared.mlp.fc_in.load_state_dict(theirs.mlp[0].state_dict())
    layer.shared.mlp.fc_out.load_state_dict(theirs.mlp[2].state_dict())
    layer.shared.coefficient.load_state_dict(theirs.coefficient.state_dict())
    x = torch.randn(T, D)
    torch.testing.assert_close(layer(x), theirs(x)[0], rtol=1e-5, atol=1e-5)
