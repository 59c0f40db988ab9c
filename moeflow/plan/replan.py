"""When new replicas pay: a plan made anew is renamed to keep what is in place, and taken where its gain exceeds its
price.

Legend: R ranks of the expert-parallel group, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeflow.plan.cost import ExpertShape, Grouping, exchange_s
from moeflow.plan.layer_cost import layer_time
from moeflow.plan.placement import MOMENT_BYTES, match_ranks
from moeflow.plan.profile import Profile
from moeflow.plan.replicas import ReplicaPlan, plan_replicas, split_rows, work_with_replicas


@dataclass(frozen=True, slots=True)
class ReplanDecision:
    """Whether to move replicas.

    Attributes:
        plan: from now on; the old one where a new one does not pay.
        copied: (expert, rank) pairs that are new.
        owned: experts whose owner changed; their optimizer state moves.
        gain_s: predicted seconds saved until the next decision; 0 without a change.
        cost_s: predicted seconds of the change.
    """

    plan: ReplicaPlan
    copied: tuple[tuple[int, int], ...]
    owned: tuple[int, ...]
    gain_s: float
    cost_s: float


def keep_hosts(plan: ReplicaPlan, old: ReplicaPlan) -> ReplicaPlan:
    """Rename the ranks of a plan so that most experts stay where they are; old owners stay owners where they can."""
    common = np.zeros((plan.ranks, plan.ranks), dtype=np.int64)
    for new_hosts, old_hosts in zip(plan.hosts, old.hosts):
        for rank in new_hosts:
            common[rank, list(old_hosts)] += 1
    name = match_ranks(common)
    hosts, shares = [], []
    for expert, (places, parts) in enumerate(zip(plan.hosts, plan.shares)):
        owner = old.hosts[expert][0]
        renamed = sorted(((int(name[rank]), share) for rank, share in zip(places, parts)))
        renamed.sort(key=lambda pair: pair[0] != owner)
        hosts.append(tuple(rank for rank, _ in renamed))
        shares.append(tuple(share for _, share in renamed))
    return ReplicaPlan(plan.ranks, tuple(hosts), tuple(shares))


def decide_replicas(
    load: NDArray,
    old: ReplicaPlan,
    slots: int,
    profile: Profile,
    shape: ExpertShape,
    grouping: Grouping,
    steps: int,
    margin: float = 1.2,
) -> ReplanDecision:
    """Plan replicas anew where the gain until the next decision exceeds the price of bringing them in place.

    Args:
        load: [E] forecast rows of each expert in one step, over all ranks; senders are taken as alike.
        old: present plan.
        slots: experts that each rank has room for.
        profile: coefficients.
        shape: of one expert.
        grouping: places of the ranks.
        steps: until the next decision.
        margin: how many times the price the gain must be.

    Raises:
        ConfigError: fewer slots than experts.
    """
    new = keep_hosts(plan_replicas(load, grouping.ranks, slots), old)
    copied = tuple(
        (expert, rank)
        for expert, (now, before) in enumerate(zip(new.hosts, old.hosts))
        for rank in sorted(set(now) - set(before))
    )
    owned = tuple(e for e, (now, before) in enumerate(zip(new.hosts, old.hosts)) if now[0] != before[0])
    if not copied and not owned and [set(h) for h in new.hosts] == [set(h) for h in old.hosts]:
        return ReplanDecision(new, (), (), 0.0, 0.0)
    counts = np.rint(np.tile(np.asarray(load, dtype=np.float64) / grouping.ranks, (grouping.ranks, 1))).astype(np.int64)
    before, after = (
        layer_time(profile, shape, grouping, work_with_replicas(split_rows(counts, plan)), 0, plan.replicated()).total_s
        for plan in (old, new)
    )
    gain, cost = steps * (before - after), replan_s(profile, shape, grouping, old, new)
    if gain <= margin * cost:
        return ReplanDecision(old, (), (), 0.0, cost)
    return ReplanDecision(new, copied, owned, gain, cost)


def replan_s(
    profile: Profile,
    shape: ExpertShape,
    grouping: Grouping,
    old: ReplicaPlan,
    new: ReplicaPlan,
    master_bytes: int = 4,
) -> float:
    """Seconds to copy experts to new hosts, and optimizer state to new owners, in one exchange."""
    size = np.zeros((grouping.ranks, grouping.ranks))
    for now, before in zip(new.hosts, old.hosts):
        for rank in set(now) - set(before):
            size[before[0], rank] += shape.parameters * shape.param_bytes
        if now[0] != before[0]:
            size[before[0], now[0]] += shape.parameters * (master_bytes + MOMENT_BYTES)
    node = grouping.node_of()
    same = node[:, None] == node[None, :]
    near, far = size * same, size * ~same
    inside, between = (np.maximum(m.sum(0), m.sum(1)) for m in (near, far))
    return float(exchange_s(profile, grouping, inside, between))
