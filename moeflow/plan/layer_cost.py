"""Predicted seconds of one MoE layer in one step, from who computes which rows.

Everything that balances load (placement, replicas, shadows) ends in the same two arrays: rows of each expert that each
rank computes, and rows that each rank sends to each other.  So one model judges all of it.

Legend: R ranks of the expert-parallel group, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeflow.plan.cost import (
    ExpertShape,
    Grouping,
    all_gather_s,
    broadcast_s,
    exchange_s,
    group_link,
    permute_s,
    products_s,
    traffic,
)
from moeflow.plan.profile import Profile

#: All-to-alls of one layer: rows out and back, forward and backward.
EXCHANGES = 4


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of the phases of one MoE layer, forward and backward, one after another.

    Attributes:
        compute_s: of the busiest rank: products and permutation.
        exchange_s: four all-to-alls.
        shadow_s: parameters of shadowed experts to all ranks, and their gradients back.
        replica_s: gradients of replicas to the expert's owner, and its new parameters back.
        imbalance: rows of the busiest rank over the mean.
    """

    compute_s: float
    exchange_s: float
    shadow_s: float = 0.0
    replica_s: float = 0.0
    imbalance: float = 1.0

    @property
    def total_s(self) -> float:
        """All phases, none of them overlapped."""
        return self.compute_s + self.exchange_s + self.shadow_s + self.replica_s


@dataclass(frozen=True, slots=True)
class Work:
    """Who computes what in one layer and step.

    Attributes:
        rows: [R, E] rows of each expert that each rank computes.
        moves: [R, R] rows that a rank (first) sends to a rank (second); the diagonal stays at home.
    """

    rows: NDArray[np.int64]
    moves: NDArray[np.int64]

    @property
    def imbalance(self) -> float:
        """Rows of the busiest rank over the mean of all."""
        per_rank = self.rows.sum(1)
        mean = per_rank.mean()
        return float(per_rank.max() / mean) if mean else 1.0


def work_of(counts: NDArray, owner: NDArray, shadows: tuple[int, ...] = ()) -> Work:
    """Rows where each expert lives on one rank, and each rank computes its own rows of shadowed ones.

    Args:
        counts: int [R, E] rows that each rank has for each expert.
        owner: int [E] rank that holds each expert.
        shadows: experts that are on every rank this step.
    """
    counts = np.asarray(counts, dtype=np.int64)
    ranks, experts = counts.shape
    sent = counts.copy()
    sent[:, list(shadows)] = 0
    rows = counts - sent
    np.add.at(rows, (owner, np.arange(experts)), sent.sum(0))
    moves = np.zeros((ranks, ranks), dtype=np.int64)
    np.add.at(moves.T, np.asarray(owner), sent.T)
    return Work(rows, moves)


def layer_time(
    profile: Profile,
    shape: ExpertShape,
    grouping: Grouping,
    work: Work,
    num_shadows: int = 0,
    replica_hosts: list[int] | None = None,
    hierarchical: bool = False,
) -> LayerTime:
    """Predict the phases of one layer.

    Args:
        profile: coefficients.
        shape: of one expert.
        grouping: places of the ranks.
        work: who computes what.
        num_shadows: experts that are broadcast to all ranks, and whose gradients come back.
        replica_hosts: hosts of each expert that has more than one; their gradients are brought together each step.
        hierarchical: two-hop all-to-all.
    """
    rows = work.rows.astype(np.float64)
    compute = (products_s(profile, shape, rows).sum(1) + permute_s(profile, shape, rows.sum(1))).max()
    inside, between = traffic(work.moves, grouping, shape.row_bytes)
    exchange = EXCHANGES * exchange_s(profile, grouping, inside, between, hierarchical) if grouping.ranks > 1 else 0.0
    shadow = shadows_s(profile, shape, grouping, num_shadows, rows.shape[1])
    replica = sum(hosts_s(profile, shape, grouping, hosts) for hosts in replica_hosts or [])
    # Owners work side by side: what one expert's replicas cost is spread over the ranks.
    replica /= max(1, grouping.ranks / max(replica_hosts)) if replica_hosts else 1
    return LayerTime(float(compute), float(exchange), shadow, replica, work.imbalance)


def shadow_s(profile: Profile, shape: ExpertShape, grouping: Grouping) -> float:
    """Seconds to broadcast one expert over the group and to reduce its gradient back to the owner."""
    return hosts_s(profile, shape, grouping, grouping.ranks)


def shadows_s(profile: Profile, shape: ExpertShape, grouping: Grouping, shadows: int, experts: int) -> float:
    """Seconds of some shadows; of all experts, one all-gather and one reduce-scatter where that is cheaper.

    With all experts shadowed a layer runs data-parallel: nothing is exchanged (Tutel's switch, arXiv:2206.03382).
    """
    one_by_one = shadows * shadow_s(profile, shape, grouping)
    if shadows < experts:
        return one_by_one
    link = group_link(profile, grouping.ranks, grouping.per_node)
    parameters = experts * shape.parameters
    gathered = all_gather_s(link, grouping.ranks, parameters * shape.param_bytes)
    return min(one_by_one, gathered + all_gather_s(link, grouping.ranks, parameters * shape.grad_bytes))


def hosts_s(profile: Profile, shape: ExpertShape, grouping: Grouping, hosts: int) -> float:
    """Seconds to bring one expert's gradient from `hosts` ranks to its owner, and its parameters back to them."""
    link = group_link(profile, hosts, grouping.per_node)
    if grouping.nodes > 1:
        link = group_link(profile, grouping.ranks, grouping.per_node)  # hosts may stand anywhere in the group
    parameters = shape.parameters
    return broadcast_s(profile, link, hosts, parameters * shape.param_bytes) + broadcast_s(
        profile, link, hosts, parameters * shape.grad_bytes
    )
