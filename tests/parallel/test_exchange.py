"""Chunks and two hops bring the same numbers as the plain exchange, in both passes."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moeflow.errors import ConfigError
from moeflow.moe import MoELayer
from moeflow.parallel.exchange import Exchanger, set_exchange
from moeflow.parallel.overlap import cut
from moeflow.parallel.parallelize import parallelize
from moeflow.parallel.topology import Topology
from moeflow.plan.profile import Link, default_profile
from moeflow.schema import ParallelConfig
from moeflow.schema.balance import OverlapConfig
from tests.distributed import run_ranks

CPU = torch.device("cpu")
LOCAL = 3


def test_chunks_are_whole_experts_and_even():
    assert cut(8, 3) == [(0, 2), (2, 5), (5, 8)]
    assert cut(2, 5) == [(0, 1), (1, 2)]
    assert cut(4, 1) == [(0, 4)]


def pretend_nodes(rank: int, per_node: int) -> None:
    os.environ["GROUP_RANK"] = str(rank // per_node)


class OneLayer(nn.ModuleDict):
    """An MoE layer alone; tensor parallelism finds nothing to cut, and shares its tokens out."""

    def tensor_regions(self) -> list:
        return []


def build(topology: Topology, overlap: OverlapConfig, num_experts: int) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = OneLayer({"moe": MoELayer(8, num_experts, 16, "naive", activation="swiglu")})
    parallelize(model, topology, 3, CPU)
    set_exchange(model, topology, overlap, default_profile("cpu"), 30.0)
    return model


def two_steps(model: nn.Module, rank: int, mode: str) -> list[torch.Tensor]:
    """Outputs and gradients of two passes of different sizes; the first one is skewed."""
    layer = model["moe"]
    found = []
    for step, tokens in enumerate((40, 7)):
        torch.manual_seed(100 * rank + step)
        x = torch.randn(1, tokens + 3 * rank, 8)
        if step == 0:
            x = x * 0.1 + torch.ones(8)  # one expert gets nearly all
        x.requires_grad_(mode != "frozen input")
        dtype = torch.bfloat16 if mode == "bf16" else torch.float32
        with torch.autocast("cpu", dtype, enabled=mode == "bf16"):
            if mode == "checkpointing":
                y = checkpoint(layer, x, use_reentrant=False)
            else:
                y = layer(x)
        if mode == "evaluation":
            with torch.no_grad():
                found.append(layer(x))
            continue
        y.square().sum().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        if x.grad is not None:
            found.append(x.grad)
    return found


def same(parallel: dict, overlap: dict, mode: str, per_node: int) -> tuple[int, bool]:
    topology = Topology.create(ParallelConfig(**parallel), 30.0)
    pretend_nodes(topology.rank, per_node)
    gloo = replace(topology, shared_memory=False)
    num_experts = LOCAL * topology["ep"].size
    plain, other = build(topology, OverlapConfig(), num_experts), build(gloo, OverlapConfig(**overlap), num_experts)
    source = topology.rank // topology["tp"].size  # tp ranks hold the same tokens
    ours, theirs = (two_steps(model, source, mode) for model in (other, plain))
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two), (one - two).abs().max()
    choice = other["moe"].dispatcher.exchanger.choice
    return choice.chunks, choice.hierarchical


LAYOUTS = [
    (2, {"ep": 2}),
    (3, {"ep": 3}),
    (4, {"ep": 4}),
    (4, {"ep": 2}),
    (4, {"ep": 2, "etp": 2}),
    (4, {"tp": 2, "ep": 4}),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "parallel"), LAYOUTS)
@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_change_nothing(world: int, parallel: dict, chunks: int):
    found = run_ranks(same, world, parallel, {"chunks": str(chunks)}, "plain", 8, timeout=60)
    assert found == [(chunks, False)] * world


@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["checkpointing", "bf16", "evaluation", "frozen input"])
def test_chunks_in_other_surroundings(mode: str):
    assert run_ranks(same, 2, {"ep": 2}, {"chunks": "2"}, mode, 8, timeout=60) == [(2, False)] * 2


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "parallel", "per_node"), [(4, {"ep": 4}, 2), (8, {"ep": 8}, 4), (8, {"ep": 4, "etp": 2}, 4)]
)
def test_two_hops_change_nothing(world: int, parallel: dict, per_node: int):
    found = run_ranks(same, world, parallel, {"exchange": "hierarchical"}, "plain", per_node, timeout=90)
    assert found == [(1, True)] * world


def refused(per_node: int) -> str:
    topology = Topology.create(ParallelConfig(ep=4), 30.0)
    pretend_nodes(topology.rank, per_node)
    with pytest.raises(ConfigError) as caught:
        build(topology, OverlapConfig(exchange="hierarchical"), 4)
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize("per_node", [1, 3, 4])
def test_two_hops_need_nodes_of_several_ranks(per_node: int):
    assert "needs several nodes" in run_ranks(refused, 4, per_node, timeout=60)[0]


def chosen(bytes_per_s: float, flops: float) -> tuple[int, bool]:
    topology = Topology.create(ParallelConfig(ep=2), 30.0)
    pretend_nodes(topology.rank, 1)
    gloo = replace(topology, shared_memory=False)
    model = build(gloo, OverlapConfig(chunks="auto", exchange="auto"), 8)
    profile = replace(
        default_profile("cpu"), flops={"fp32": flops}, half_rows=0, launch_s=0, overlap=1.0, chunk_s=0,
        inside=Link(0, bytes_per_s), between=Link(0, bytes_per_s), shared_nic=False,
    )  # fmt: skip
    exchanger = Exchanger(OverlapConfig(chunks="auto", exchange="auto"), profile, ["a", "b"], None)
    model["moe"].dispatcher.exchanger = exchanger
    # Different numbers of tokens, one decision.
    model["moe"](torch.randn(1, 50 + 20 * topology.rank, 8))
    assert exchanger.choice.chosen_s <= exchanger.choice.plain_s
    return exchanger.choice.chunks, exchanger.choice.hierarchical


@pytest.mark.distributed
def test_the_cost_model_chooses_for_all_ranks():
    # Exchange and experts of one size: chunks; an exchange that costs nothing: none.
    assert run_ranks(chosen, 2, 1e6, 4.8e7, timeout=60) == [(4, False)] * 2
    assert run_ranks(chosen, 2, 1e12, 4.8e7, timeout=60) == [(1, False)] * 2
