from __future__ import annotations

import pytest
import torch
from torch import nn

from moeflow.models import build_model
from moeflow.models.flops import count_parameters, forward_flops
from moeflow.moe import DenseMLP, MoELayer, ResidualExperts, SharedExperts
from moeflow.schema import ConvNetConfig, GShardGateConfig, LeNetConfig, NaiveGateConfig, SwitchGateConfig
from tests.models.gpts import VOCAB, gpt, tokens

CONVNET = {"widths": [16, 32], "depths": [1, 1], "moe_stages": [1], "mlp_ratio": 3.0}


def convnet(num_experts: int, gate=None) -> nn.Module:
    return build_model(ConvNetConfig(num_experts=num_experts, **CONVNET), gate or NaiveGateConfig())


def dense_convnet_flops() -> int:
    stem = 16 * 16 * 16 * 3 * 4 * 4
    stage0 = 16 * 16 * 16 * 16 * 9
    transition = 16 * 16 * 32 * 16 * 9
    stage1 = 8 * 8 * 32 * 32 * 9
    mlp = 8 * 8 * 2 * 32 * 96
    return 2 * (stem + stage0 + transition + stage1 + mlp + 32 * 10)


def test_convnet_by_hand():
    image = torch.zeros(1, 3, 32, 32)
    assert forward_flops(convnet(0), image) == dense_convnet_flops()
    gate = 2 * 64 * 32 * 8
    assert forward_flops(convnet(8), image) == dense_convnet_flops() + gate
    assert forward_flops(convnet(8), image.expand(5, -1, -1, -1)) == 5 * (dense_convnet_flops() + gate)


@pytest.mark.parametrize(
    "gate",
    [SwitchGateConfig(), SwitchGateConfig(capacity_factor=None), NaiveGateConfig(top_k=4), GShardGateConfig()],
    ids=lambda gate: f"{gate.name}-{gate.top_k}-{gate.capacity_factor}",
)
def test_cost_depends_on_neither_capacity_nor_the_number_of_experts(gate):
    image = torch.zeros(1, 3, 32, 32)
    for num_experts in (8, 32):
        router = 2 * 64 * 32 * num_experts
        assert forward_flops(convnet(num_experts, gate), image) - router == dense_convnet_flops()


def test_parameters_of_lenet_by_hand():
    expert = 400 * 120 + 120 + 120 * 84 + 84
    rest = (3 * 6 * 25 + 6) + (6 * 16 * 25 + 16) + 400 * 64 + (84 * 10 + 10)
    assert count_parameters(build_model(LeNetConfig(), GShardGateConfig())) == (64 * expert + rest, 2 * expert + rest)
    assert count_parameters(build_model(LeNetConfig(num_experts=0), GShardGateConfig()))[0] == (
        400 * 240 + 240 + 240 * 84 + 84 + rest - 400 * 64
    )


def test_tied_embedding_counts_once_and_transformer_flops_by_hand():
    """2 FLOPs a weight and token, and 2 * 2 * S * S * D of attention's products in each layer."""
    model = gpt(num_experts=0, tie_embeddings=True)
    config = model.config
    total, active = count_parameters(model)
    unique = {id(p): p for p in model.parameters()}
    assert total == active == sum(p.numel() for p in unique.values())
    weights = sum(p.numel() for p in unique.values() if p.ndim == 2)
    assert VOCAB in model.head.weight.shape, "the head is a product, the embedding it is tied to is not"
    length = 12
    attention = config.num_layers * 4 * length * length * config.d_model
    assert forward_flops(model, tokens(1, length)) == 2 * weights * length + attention


def test_model_stays_as_it_was():
    model = convnet(4)
    model(torch.randn(2, 3, 32, 32))
    layer = next(module for module in model.modules() if isinstance(module, MoELayer))
    before = [(name, p, p.clone()) for name, p in model.named_parameters()]
    stats, modules = layer.last_stats, list(model.modules())
    forward_flops(model, torch.randn(2, 3, 32, 32))
    assert model.training and layer.last_stats is stats
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert all(p is q and torch.equal(p, value) for (_, p, value), q in zip(before, model.parameters(), strict=True))


def test_model_without_memory():
    with torch.device("meta"):
        model = convnet(8)
    assert forward_flops(model, torch.zeros(1, 3, 32, 32)) == forward_flops(convnet(8), torch.zeros(1, 3, 32, 32))
    assert count_parameters(model) == count_parameters(convnet(8))


def test_a_layer_alone():
    layer = MoELayer(16, 4, 24, NaiveGateConfig(top_k=3), activation="swiglu", d_out=20)
    per_token = 3 * 2 * (2 * 24 * 16 + 20 * 24) + 2 * 4 * 16
    assert forward_flops(layer, torch.zeros(2, 7, 16)) == 14 * per_token


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_count_for_every_token(gated):
    alone = MoELayer(16, 4, 24, NaiveGateConfig(top_k=2))
    layer = MoELayer(16, 4, 24, NaiveGateConfig(top_k=2), shared=SharedExperts(DenseMLP(16, 40), 16, gated=gated))
    more = 2 * (16 * 40 + 40 * 16) + (2 * 16 if gated else 0)
    x = torch.zeros(2, 7, 16)
    assert forward_flops(layer, x) == forward_flops(alone, x) + 14 * more


def test_residual_experts_count_their_mixing_too():
    layer = MoELayer(16, 4, 24, NaiveGateConfig(), shared=ResidualExperts(DenseMLP(16, 40), 16))
    x = torch.zeros(5, 16)
    more = 2 * (2 * 16 * 40 + 2 * 16)
    assert forward_flops(layer, x) == forward_flops(MoELayer(16, 4, 24, NaiveGateConfig()), x) + 5 * more
