"""Replicas of hot experts: which experts stand on more than one rank, and which rows go to which of them.

Two decisions at two speeds:

* `plan_replicas` (rarely, from a forecast of loads) gives each rank a fixed number of slots and fills them so that the
  forecast splits evenly.
* `split_rows` (each step, from the counts that all ranks share) sends the step's rows to the replicas so that the
  busiest rank has as little to do as these replicas allow.  So a forecast that is a hundred steps old still serves
  well: the replicas have to stand where there is room, not to have been foreseen to the row.

All in whole numbers where ranks must agree.

Legend: R ranks of the expert-parallel group, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeflow.errors import ConfigError
from moeflow.plan.layer_cost import Work

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """Where each expert stands.

    Attributes:
        ranks: R.
        hosts: of each expert; the first of them owns it (keeps its optimizer state).
        shares: of each expert, the share of its rows that the forecast gave each host; a sum of 1.
    """

    ranks: int
    hosts: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...]

    def slots(self) -> list[list[int]]:
        """Experts on each rank, ascending."""
        return [[e for e, hosts in enumerate(self.hosts) if rank in hosts] for rank in range(self.ranks)]

    def owner(self) -> Ints:
        """[E] first host of each expert."""
        return np.array([hosts[0] for hosts in self.hosts], dtype=np.int64)

    def replicated(self) -> list[int]:
        """Number of hosts of each expert that has more than one."""
        return [len(hosts) for hosts in self.hosts if len(hosts) > 1]


def plan_replicas(load: NDArray, ranks: int, slots: int) -> ReplicaPlan:
    """Fill the slots of all ranks from a forecast of loads.

    First each rank in turn gets whole small experts and, to fill it to the mean exactly, a piece of the largest one
    that is left (the alias method of Walker and Vose, with more than two to a bin): E + R - 1 slots then always
    suffice for an even split.  Slots that are left over give the hottest experts further hosts, on the ranks with
    least to do, which is where drift will need room.

    Args:
        load: [E] forecast rows of each expert, in any unit.
        ranks: R.
        slots: experts that each rank has room for.

    Returns:
        The plan; without spare slots, one host each.

    Raises:
        ConfigError: fewer slots than experts.
    """
    experts = len(load)
    if ranks * slots < experts:
        raise ConfigError(
            f"{ranks} ranks x {slots} slots do not hold {experts} experts", f"at least {-(-experts // ranks)} slots"
        )
    load = np.maximum(np.asarray(load, dtype=np.float64), 1e-9 * max(1.0, float(np.max(load))))
    bins = _fill_evenly(load.tolist(), ranks, slots)
    _use_spare_slots(bins, load, slots)
    hosts = [[rank for rank in range(ranks) if expert in bins[rank]] for expert in range(experts)]
    shares = _balanced_shares(load, hosts, bins)
    return ReplicaPlan(ranks, tuple(tuple(h) for h in hosts), shares)


def _fill_evenly(load: list[float], ranks: int, slots: int) -> list[dict[int, float]]:
    """Rank by rank: whole experts, then a piece of the largest; returns expert -> load of each rank."""
    left = dict(enumerate(load))
    target = sum(load) / ranks
    bins: list[dict[int, float]] = []
    for rank in range(ranks):
        later = ranks - rank - 1
        order = sorted(left, key=lambda expert: (left[expert], expert))
        if later == 0:
            bins.append({expert: left[expert] for expert in order})
            break
        # Whole experts now, so that those that are left fit in the slots of the ranks that are left.
        whole = max(
            0, min(-(-len(order) // (later + 1)), slots - 1 if slots * later >= len(order) - slots + 1 else slots)
        )
        whole = max(whole, len(order) - later * slots)
        bins.append(_fill_one(left, order, target, whole, slots))
    assert all(len(b) <= slots for b in bins), "slots were counted before"
    return bins


def _fill_one(left: dict[int, float], order: list[int], target: float, whole: int, slots: int) -> dict[int, float]:
    large, rest = order[-1], order[:-1]
    if whole > len(rest):
        taken = {expert: left.pop(expert) for expert in order[:whole]}
        return taken
    picks = list(range(whole))

    def total() -> float:
        return sum(left[rest[i]] for i in picks)

    # The smallest ones, raised one step at a time until a piece of the largest can fill what is missing.
    while total() + left[large] < target:
        for at in reversed(range(whole)):
            if picks[at] + 1 < (picks[at + 1] if at + 1 < whole else len(rest)):
                picks[at] += 1
                break
        else:
            break
    taken = {rest[i]: left.pop(rest[i]) for i in picks}
    missing = target - sum(taken.values())
    if missing > 1e-9 * target and len(taken) < slots:
        piece = min(missing, left[large])
        taken[large] = piece
        left[large] -= piece
    return taken


def _use_spare_slots(bins: list[dict[int, float]], load: NDArray, slots: int) -> None:
    """Give spare slots to the experts with most rows a host, on the ranks whose experts have least elsewhere to go."""
    hosts = np.zeros(len(load))
    for held in bins:
        for expert in held:
            hosts[expert] += 1
    while True:
        # A rank that holds every expert has no use for more slots.
        free = [rank for rank, held in enumerate(bins) if len(held) < min(slots, len(load))]
        if not free:
            return
        # Rows that would be on the rank if every expert were split evenly: where it is least there is most room.
        even = [sum(load[e] / hosts[e] for e in bins[rank]) for rank in free]
        rank = free[int(np.argmin(even))]
        outside = [e for e in range(len(load)) if e not in bins[rank]]
        expert = max(outside, key=lambda e: (load[e] / hosts[e], -e))
        bins[rank][expert] = 0.0
        hosts[expert] += 1


def _balanced_shares(
    load: NDArray, hosts: list[list[int]], bins: list[dict[int, float]]
) -> tuple[tuple[float, ...], ...]:
    """Shares of the forecast, with every host of a replicated expert taking part."""
    scale = 1_000_000 / max(1.0, float(load.sum()))
    totals = [max(1, round(x * scale)) for x in load.tolist()]
    start = [[round(bins[rank].get(expert, 0.0) * scale) for rank in h] for expert, h in enumerate(hosts)]
    for expert, h in enumerate(start):
        h[0] += totals[expert] - sum(h)
    split = _level(totals, hosts, start, len(bins))
    return tuple(tuple(x / totals[e] for x in parts) for e, parts in enumerate(split))


def split_totals(totals: Sequence[int], plan: ReplicaPlan, base: Sequence[int] | None = None) -> list[list[int]]:
    """Divide the rows of each expert among its hosts so that the busiest rank has as few as can be.

    Starts from the plan's shares, then levels the hosts of the busiest ranks' experts among themselves until no rank
    is more than half a percent above the mean or nothing helps.  Levelling one expert at a time lowers the sum of
    squares, a convex function of the split, so it ends at the split whose maximum is least.

    Args:
        totals: [E] rows of each expert in this step.
        plan: who holds what.
        base: [R] rows that each rank has in any case (its own rows of shadowed experts).

    Returns:
        Rows of each expert for each of its hosts, in the order of `plan.hosts`; whole numbers.
    """
    start = []
    for total, shares in zip(totals, plan.shares, strict=True):
        parts = [int(total * share) for share in shares]
        parts[0] += total - sum(parts)
        start.append(parts)
    return _level(list(totals), plan.hosts, start, plan.ranks, base)


def _level(
    totals: list[int],
    hosts: Sequence[Sequence[int]],
    split: list[list[int]],
    ranks: int,
    base: Sequence[int] | None = None,
) -> list[list[int]]:
    busy = [0] * ranks if base is None else [int(x) for x in base]
    held: list[list[int]] = [[] for _ in range(ranks)]
    for expert, places in enumerate(hosts):
        for rank, rows in zip(places, split[expert]):
            busy[rank] += rows
        if len(places) > 1 and totals[expert]:
            for rank in places:
                held[rank].append(expert)
    goal = -(-sum(busy) * 1005 // (ranks * 1000))
    order = list(range(ranks))
    for _ in range(8):
        order.sort(key=lambda rank: (-busy[rank], rank))
        moved = 0
        for rank in order:
            if busy[rank] <= goal:
                break
            for expert in held[rank]:
                moved += _level_one(totals[expert], hosts[expert], split[expert], busy)
        if moved * 1000 * ranks <= sum(busy):
            break
    return split


def _level_one(total: int, places: Sequence[int], parts: list[int], busy: list[int]) -> int:
    """Pour one expert's rows anew over its hosts, onto what they have beside it; returns rows that moved."""
    under = [busy[rank] - part for rank, part in zip(places, parts)]
    water, count, level = total, 0, 0
    for height in sorted(under):
        if count and height * count >= water:
            break
        water += height
        count += 1
    level, extra = divmod(water, count)
    moved = 0
    for at, rank in enumerate(places):
        new = level - under[at]
        if new < 0:
            new = 0
        elif extra:  # rows left over by the division go to the first hosts that get any
            new += 1
            extra -= 1
        moved += abs(new - parts[at])
        parts[at] = new
        busy[rank] = under[at] + new
    return moved


def split_rows(counts: NDArray, plan: ReplicaPlan, base: Sequence[int] | None = None) -> Ints:
    """Which rank's rows go to which host, in this step: each rank serves itself first, then others in order of rank.

    Args:
        counts: int [R, E] rows that each rank has for each expert, the same on all ranks.  Experts with a zero column
            (shadowed ones) take no part.
        plan: who holds what.
        base: [R] rows that each rank computes beside these.

    Returns:
        int64 [R, E, R]: rows of a rank (first) for an expert that are computed on a rank (last).
    """
    counts = np.asarray(counts, dtype=np.int64)
    ranks, experts = counts.shape
    split = split_totals(counts.sum(0).tolist(), plan, base)
    room = np.zeros((experts, ranks), dtype=np.int64)
    for expert, (places, parts) in enumerate(zip(plan.hosts, split)):
        for rank, rows in zip(places, parts):
            room[expert, rank] = rows
    return assign_rows(counts, room)


def assign_rows(counts: Ints, room: Ints) -> Ints:
    """Rows by sender, expert and receiver, where each expert's receivers have room for all of its rows.

    Args:
        counts: [R, E] rows that each rank has.
        room: [E, R] rows that each rank computes; sums over ranks are those of `counts`.

    Returns:
        [R, E, R].
    """
    supply = counts.T
    home = np.minimum(supply, room)
    # What is left is laid end to end by sender and by receiver; a pair gets the overlap of its two intervals.
    sent, taken = np.cumsum(supply - home, axis=1), np.cumsum(room - home, axis=1)
    sent_lo, taken_lo = sent - (supply - home), taken - (room - home)
    hi = np.minimum(sent[:, :, None], taken[:, None, :])
    lo = np.maximum(sent_lo[:, :, None], taken_lo[:, None, :])
    moves = np.maximum(hi - lo, 0)
    rank = np.arange(counts.shape[0])
    moves[:, rank, rank] += home
    return moves.transpose(1, 0, 2)


def work_with_replicas(moves: Ints, local: Ints | None = None) -> Work:
    """The step's work from `split_rows`.

    Args:
        moves: [R, E, R] rows by sender, expert and receiver.
        local: [R, E] rows of shadowed experts that each rank keeps.
    """
    rows = moves.sum(0).T
    return Work(rows if local is None else rows + local, moves.sum(1))
