"""Initial values: those of nn.Linear, different for each expert, and the same for any split of the experts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from moeflow.errors import ConfigError
from moeflow.models.init import derive_seed, generator_for, initialize
from moeflow.moe import MLPExperts, MoELayer


def drawn(seed: int = 0, activation: str = "gelu", **kwargs) -> MLPExperts:
    model = nn.Module()
    model.experts = MLPExperts(8, 64, 96, activation=activation, **kwargs)
    initialize(model, seed)
    return model.experts


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_each_expert_is_drawn_like_a_linear_layer(activation: str):
    experts = drawn(activation=activation)
    for weight, fan_in in ((experts.w_in, 64), (experts.w_out, 96)):
        bound = 1 / math.sqrt(fan_in)
        expected = nn.Linear(fan_in, 4096).weight.std()
        for e in range(8):
            assert weight[e].std().item() == pytest.approx(expected.item(), rel=0.05)
            assert weight[e].abs().max() <= bound
            assert weight[e].abs().max() > 0.99 * bound
    assert experts.b_in.abs().sum() == experts.b_out.abs().sum() == 0


def test_normal_values_of_a_given_size():
    experts = drawn(init_std=0.02, out_init_std=0.005)
    assert experts.w_in.std().item() == pytest.approx(0.02, rel=0.05)
    assert experts.w_out.std().item() == pytest.approx(0.005, rel=0.05)


def test_experts_and_seeds_differ():
    experts, again, other = drawn(0), drawn(0), drawn(1)
    assert torch.equal(experts.w_in, again.w_in)
    assert not torch.equal(experts.w_in, other.w_in)
    for e in range(1, 8):
        assert not torch.equal(experts.w_in[0], experts.w_in[e])


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (8, 1), (1, 2), (4, 3)])
def test_any_split_draws_slices_of_the_same_values(ep: int, etp: int, activation: str):
    whole = drawn(7, activation)
    for ep_rank in range(ep):
        for etp_rank in range(etp):
            model = nn.Module()
            with torch.device("meta"):
                model.experts = MLPExperts(8, 64, 96, activation=activation)
            model.experts.shard(ep_rank, ep, etp_rank, etp)
            assert model.experts.w_in.is_meta
            model.to_empty(device="cpu")
            initialize(model, 7)
            experts = slice(ep_rank * 8 // ep, (ep_rank + 1) * 8 // ep)
            hidden = slice(etp_rank * 96 // etp, (etp_rank + 1) * 96 // etp)
            assert torch.equal(model.experts.w_in, whole.w_in[experts][..., hidden, :])
            assert torch.equal(model.experts.w_out, whole.w_out[experts][..., hidden])


def test_order_of_construction_does_not_matter():
    first, second = nn.Module(), nn.Module()
    first.a, first.b = nn.Linear(3, 4), MoELayer(4, 4, 8)
    second.b = MoELayer(4, 4, 8)
    torch.rand(1)
    second.a = nn.Linear(3, 4)
    initialize(first, 3)
    initialize(second, 3)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))


def test_names_are_global():
    part = nn.Linear(3, 4)
    whole = nn.ModuleDict({"stage": nn.ModuleDict({"fc": nn.Linear(3, 4)})})
    initialize(whole, 5)
    initialize(part, 5, prefix="stage.fc")
    assert torch.equal(part.weight, whole["stage"]["fc"].weight)


def test_the_callers_random_numbers_are_left_alone():
    torch.manual_seed(11)
    expected = torch.rand(3)
    model = nn.Sequential(nn.Linear(2, 2), MoELayer(2, 2, 4))
    torch.manual_seed(11)
    initialize(model, 0)
    assert torch.equal(torch.rand(3), expected)


def test_parameters_without_a_way_to_draw_them_are_named():
    model = nn.Module()
    model.scale = nn.Module()
    model.scale.weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="module 'scale'"):
        initialize(model, 0)


def test_seeds_are_the_same_in_every_process():
    # A constant, so that a change of interpreter or of hash seed would be seen: checkpoints of old runs rely on it.
    assert derive_seed(3, "a.b", "w_in", 2) == 3482400795945226767
    assert derive_seed(3, "a.b", "w_in", 3) != derive_seed(3, "a.b", "w_in", 2)
    assert generator_for(1, "x").initial_seed() == derive_seed(1, "x")
