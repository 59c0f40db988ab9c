"""The topology-aware gate learns the nodes from the ranks, and its limit from the cost model."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from moeflow.moe import MoELayer
from moeflow.parallel.parallelize import parallelize
from moeflow.parallel.topology import Topology
from moeflow.plan.outgoing import outgoing_share
from moeflow.plan.profile import default_profile
from moeflow.schema import ParallelConfig
from moeflow.schema.gate import TopologyGateConfig
from tests.distributed import run_ranks


def _routed(share: float | None, per_node: int) -> tuple[list[int], int, float | None, float]:
    import torch.distributed as dist

    os.environ["GROUP_RANK"] = str(dist.get_rank() // per_node)
    topology = Topology.create(ParallelConfig(ep=4), 30.0)
    with torch.device("meta"):
        model = nn.Sequential(MoELayer(8, 8, 8, gate=TopologyGateConfig(outgoing_share=share)))
    parallelize(model, topology, 0, torch.device("cpu"))
    gate = model[0].gate
    torch.manual_seed(topology.rank)
    x = torch.randn(64, 8)
    model(x).sum().backward()
    ids = gate(x).ids_TK
    away = (gate.node_of_expert_E[ids.clamp(min=0)] != gate.own_node) & (ids >= 0)
    return gate.node_of_expert_E.tolist(), gate.own_node, gate.share, away.float().mean().item()


@pytest.mark.distributed
def test_two_nodes_of_two_ranks():
    expected = outgoing_share(default_profile("cpu"), 2, 2)
    for rank, (nodes, own, share, away) in enumerate(run_ranks(_routed, 4, None, 2, timeout=60)):
        assert nodes == [0, 0, 0, 0, 1, 1, 1, 1]
        assert own == rank // 2
        assert share == expected
        assert away <= share


@pytest.mark.distributed
def test_what_is_configured_is_kept_and_one_node_is_not_limited():
    assert [found[2] for found in run_ranks(_routed, 4, 0.25, 2, timeout=60)] == [0.25] * 4
    assert [found[2] for found in run_ranks(_routed, 4, None, 4, timeout=60)] == [None] * 4
