from __future__ import annotations

import torch
from torch import nn

from moeflow.models import build_model
from moeflow.models.init import initialize
from moeflow.models.lenet import LeNet
from moeflow.schema import GShardGateConfig, LeNetConfig, NaiveGateConfig
from tests.moe.reference import all_experts, moe_by_loop, top_k_by_sorting


def lenet(gate=None, **options) -> LeNet:
    model = build_model(LeNetConfig(**options), gate or GShardGateConfig())
    initialize(model, 0)
    return model


def test_layers_are_those_of_the_tutorial():
    """Sizes by hand: 64 experts 400 -> 120 -> 84 stand where LeNet has its first two full layers."""
    model = lenet()
    expert = 400 * 120 + 120 + 120 * 84 + 84
    rest = (3 * 6 * 25 + 6) + (6 * 16 * 25 + 16) + 400 * 64 + (84 * 10 + 10)
    assert sum(p.numel() for p in model.parameters()) == 64 * expert + rest
    assert model(torch.randn(5, 3, 32, 32)).shape == (5, 10)
    assert model.mlp.last_stats.tokens_per_expert_E.sum() <= 10, "an image is one token with two experts at most"


def test_logits_are_those_of_the_network_written_out():
    model = lenet(NaiveGateConfig(), num_experts=6)
    x = torch.randn(7, 3, 32, 32)
    features = nn.Sequential(
        model.conv1, nn.ReLU(), nn.MaxPool2d(2), model.conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    )(x)
    probs = (features @ model.mlp.gate.proj.weight.T).softmax(1)
    ids = [top_k_by_sorting(row, 2) for row in probs.tolist()]
    chosen = torch.stack([probs[t, row] for t, row in enumerate(ids)])
    y = moe_by_loop(features, ids, chosen / chosen.sum(1, keepdim=True), all_experts(model.mlp))
    torch.testing.assert_close(model(x), model.head(y.relu()), rtol=1e-5, atol=1e-6)


def test_dense_twin_has_the_active_width():
    model = lenet(num_experts=0)
    assert [layer.out_features for layer in model.mlp if isinstance(layer, nn.Linear)] == [240, 84]
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_learns():
    """Two dozen steps halve the loss on images whose color tells the class."""
    model = lenet(num_experts=8)
    targets = torch.arange(40) % 10
    palette = torch.randn(10, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    batch = {"inputs": palette[targets].expand(-1, -1, 32, 32).contiguous(), "targets": targets}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        loss = model.task.loss(model(batch["inputs"]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
