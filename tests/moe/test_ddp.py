"""Under PyTorch's DDP, in a plain script: gradients are those of one process with the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moeflow.models.init import initialize
from moeflow.moe import DenseMLP, MoELayer, SharedExperts
from moeflow.schema.gate import GATES, NaiveGateConfig
from tests.distributed import run_ranks

WORLD, T, D = 2, 12, 6


def small(d_model: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d_model, 5), nn.ReLU(), nn.Linear(5, d_model))


def build(kind: str) -> nn.Module:
    options = {"naive": {}, "list": {"experts": [small] * 8}, "stacked": {"experts": small}}.get(kind)
    gate = NaiveGateConfig(top_k=1, load_balance_coef=0.0, z_loss_coef=0.1)
    if options is None:
        gate, options = GATES[kind](load_balance_coef=0.0, capacity_factor=None), {}
    layer = MoELayer(D, 8, 10, gate, shared=SharedExperts(DenseMLP(D, 4), D), **options)
    model = nn.Sequential(nn.Linear(D, D), layer)
    initialize(model, 0)
    return model


def batch() -> torch.Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(3))


def train_step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model(x).square().sum(1).mean().backward()
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}


def on_a_rank(kind: str) -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    # Few tokens and eight experts: some are idle on each rank, which must not confuse DDP.
    return train_step(DistributedDataParallel(build(kind)), batch().chunk(WORLD)[rank])


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["naive", "list", "stacked", "aux_free"])
def test_gradients_are_those_of_the_whole_batch(kind: str):
    expected = train_step(build(kind), batch())
    for grads in run_ranks(on_a_rank, WORLD, kind, timeout=60):
        assert set(grads) == set(expected)
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad, expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )
