from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moeflow.errors import ConfigError
from moeflow.models import build_model
from moeflow.models.convnet import ConvNet, TokenBlock
from moeflow.models.init import initialize
from moeflow.schema import ConvNetConfig, NaiveGateConfig, SwitchGateConfig
from tests.moe.reference import all_experts, moe_by_loop, top_k_by_sorting

SMALL = {"widths": [16, 32], "depths": [1, 2], "moe_stages": [1], "num_experts": 4}


def small(gate: NaiveGateConfig | SwitchGateConfig | None = None, **options) -> ConvNet:
    model = build_model(ConvNetConfig(**{**SMALL, **options}), gate or NaiveGateConfig())
    initialize(model, 0)
    return model


def images(count: int, seed: int = 1) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def convolution(weights: dict[str, Tensor], name: str, x: Tensor, groups: int) -> Tensor:
    x = functional.group_norm(x, groups, weights[f"{name}.norm.weight"], weights[f"{name}.norm.bias"])
    return functional.conv2d(x * torch.sigmoid(x), weights[f"{name}.conv.weight"], padding=1)


def token_block(block: TokenBlock, x: Tensor) -> Tensor:
    """One image after another, one position after another."""
    mean = x.mean(1, keepdim=True)
    normed = (x - mean) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    normed = normed * block.norm.weight[:, None, None] + block.norm.bias[:, None, None]
    tokens = normed.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    probs = (tokens @ block.mlp.gate.proj.weight.T).softmax(1)
    ids = [top_k_by_sorting(row, 2) for row in probs.tolist()]
    chosen = torch.stack([probs[t, row] for t, row in enumerate(ids)])
    y = moe_by_loop(tokens, ids, chosen / chosen.sum(1, keepdim=True), all_experts(block.mlp))
    return x + y.reshape(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)


def written_out(model: ConvNet, x: Tensor) -> Tensor:
    weights = dict(model.named_parameters())
    x = functional.conv2d(x, weights["stem.weight"], weights["stem.bias"], stride=2, padding=1)
    x = x + convolution(weights, "blocks.0.body", x, groups=1)
    x = convolution(weights, "blocks.1.body", x, groups=1)
    x = torch.stack([x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]).amax(0)
    x = x + convolution(weights, "blocks.2.body", x, groups=2)
    x = token_block(model.blocks["3"], x)
    x = x + convolution(weights, "blocks.4.body", x, groups=2)
    x = token_block(model.blocks["5"], x)
    pooled = x.flatten(2).amax(2)
    return model.head(functional.layer_norm(pooled, (32,), weights["norm.weight"], weights["norm.bias"]))


def test_logits_and_gradients_are_those_of_the_network_written_out():
    model = small(NaiveGateConfig(load_balance_coef=0.0))
    upstream = torch.randn(2, 10)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found, expected = model(images(2)), written_out(model, images(2))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for name, ours, theirs in zip(
        names,
        torch.autograd.grad(found, parameters, upstream),
        torch.autograd.grad(expected, parameters, upstream, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("experts", [0, 4])
def test_a_sample_does_not_depend_on_its_batch(training: bool, experts: int):
    model = small(num_experts=experts).train(training)
    batch = images(5)
    alone = torch.cat([model(batch[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(model(batch), alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(batch.contiguous(memory_format=torch.channels_last)), alone, rtol=1e-5, atol=1e-6)


def test_a_dropped_token_keeps_its_value():
    gate = SwitchGateConfig(capacity_factor=1e-6, jitter=0.0)
    block = TokenBlock(16, 32, num_experts=4, gate=gate)
    x = torch.randn(2, 16, 3, 3)
    changed = (block(x) != x).any(1)
    # One token is the least that an expert takes.
    assert 1 <= changed.sum() <= 4


def test_every_parameter_gets_a_gradient_and_initial_values_follow_the_seed():
    model, same, other = small(), small(), small()
    initialize(other, 1)
    model.task.loss(model(images(4)), {"targets": torch.arange(4)}).backward()
    for (name, ours), same_values, other_values in zip(
        model.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert ours.grad is not None and ours.grad.abs().max() > 0, name
        assert torch.equal(ours, same_values), name
        assert not torch.equal(ours, other_values) or ours.unique().numel() == 1, name


@pytest.mark.parametrize("experts", [0, 4])
def test_learns_labels_by_heart(experts: int):
    model = small(num_experts=experts)
    batch = {"inputs": images(16), "targets": torch.arange(16) % 10}
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        optimizer.zero_grad()
        model.task.loss(model(batch["inputs"]), batch).backward()
        optimizer.step()
    correct, count = model.task.metrics(model(batch["inputs"]), batch)["accuracy"]
    assert (correct, count) == (16, 16)


def test_width_of_an_expert_shares_out_that_of_the_dense_twin():
    dense = TokenBlock(32, 96, 0, NaiveGateConfig())
    assert dense.mlp[0].out_features == 96
    for top_k, width in ((1, 96), (2, 48), (5, 20)):
        assert TokenBlock(32, 96, 8, NaiveGateConfig(top_k=top_k)).mlp.experts.d_hidden == width


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"widths": [16, 40]}, ["model.widths", "40", "48"]),
        ({"depths": [1]}, ["model.depths", "model.widths"]),
        ({"moe_stages": [2]}, ["model.moe_stages", "2", "0 to 1"]),
        ({"widths": [], "depths": [], "moe_stages": []}, ["model.widths", "1 to 5"]),
        ({"widths": [16] * 6, "depths": [1] * 6}, ["6 stages", "1 to 5"]),
        ({"mlp_ratio": 0.001}, ["model.mlp_ratio=0.001", "or more"]),
    ],
)
def test_options_that_do_not_fit(options: dict, words: list[str]):
    with pytest.raises(ConfigError) as error:
        small(**options)
    assert all(word in str(error.value) for word in words)


def test_as_many_stages_as_an_image_has_room_for():
    net = small(widths=[16] * 5, depths=[1] * 5)
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 10)
