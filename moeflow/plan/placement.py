"""Which rank holds which experts, from a smoothed history of loads, and when a move pays (SmartMoE, ATC 2023).

Pure functions: the caller keeps the history and the placement, and moves parameters and optimizer state itself.

Legend: R ranks of the expert-parallel group, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeflow.errors import ConfigError
from moeflow.plan.cost import ExpertShape, Grouping, exchange_s
from moeflow.plan.layer_cost import layer_time, work_of
from moeflow.plan.profile import Profile

#: Bytes of AdamW's two fp32 moments, which move with an expert's parameters.
MOMENT_BYTES = 8


def smooth(history: NDArray | None, counts: NDArray, decay: float = 0.5) -> NDArray[np.float64]:
    """Mix new counts into a history of loads.

    Args:
        history: [...] what was returned before; None at the start.
        counts: [...] rows, summed over the ranks and steps since the last call.
        decay: weight of the past; 0 forgets it.

    Returns:
        [...] decay * history + (1 - decay) * counts.
    """
    now = np.asarray(counts, dtype=np.float64)
    return now if history is None else decay * history + (1.0 - decay) * now


def place_experts(load: NDArray, ranks: int, old: NDArray | None = None) -> NDArray[np.int64]:
    """Spread experts, equally many on each rank, so that the busiest rank has as little as can be found.

    Longest processing time first (Graham 1969) onto the rank with least load and a free place, then swaps of two
    experts that lower the busier of their two ranks, from the busiest rank on.  Last, whole ranks are renamed so that
    as many experts as possible stay where they are.

    Args:
        load: [E] forecast rows of each expert.
        ranks: R, a divisor of E.
        old: [E] present rank of each expert.

    Returns:
        [E] rank of each expert.

    Raises:
        ConfigError: experts do not divide over ranks.
    """
    load = np.asarray(load, dtype=np.float64)
    experts = len(load)
    if experts % ranks:
        raise ConfigError(f"{experts} experts do not divide over {ranks} ranks", "a number of ranks that divides them")
    owner = np.zeros(experts, dtype=np.int64)
    busy, free = np.zeros(ranks), np.full(ranks, experts // ranks)
    for expert in np.argsort(-load, kind="stable"):
        rank = int(np.argmin(np.where(free > 0, busy, np.inf)))
        owner[expert] = rank
        busy[rank] += load[expert]
        free[rank] -= 1
    _swap(load, owner, busy)
    return owner if old is None else keep_names(owner, np.asarray(old), ranks)


def _swap(load: NDArray, owner: NDArray, busy: NDArray) -> None:
    for _ in range(len(load)):
        for rank in np.argsort(-busy, kind="stable"):
            mine, others = np.flatnonzero(owner == rank), np.flatnonzero(owner != rank)
            if len(others) == 0:
                return
            shift = load[mine][:, None] - load[others][None]  # what the busier rank loses
            before = np.maximum(busy[rank], busy[owner[others]])
            after = np.maximum(busy[rank] - shift, busy[owner[others]][None] + shift)
            gain = np.where(shift > 0, before - after, 0.0)
            best = int(gain.argmax())
            if gain.flat[best] > 1e-9 * busy.max():
                a, b = mine[best // len(others)], others[best % len(others)]
                other = owner[b]
                moved = load[a] - load[b]
                busy[rank] -= moved
                busy[other] += moved
                owner[a], owner[b] = other, rank
                break
        else:
            return


def keep_names(owner: NDArray, old: NDArray, ranks: int) -> NDArray[np.int64]:
    """Rename the ranks of a placement so that most experts stay: pairs of ranks with most experts in common first."""
    common = np.zeros((ranks, ranks), dtype=np.int64)
    np.add.at(common, (owner, old), 1)
    return match_ranks(common)[owner]


def match_ranks(common: NDArray[np.int64]) -> NDArray[np.int64]:
    """Name for each new rank: pairs with most in common first.

    Args:
        common: [R, R] experts that a new rank (first) and a present one have in common.
    """
    common = common.copy()
    ranks = len(common)
    name = np.full(ranks, -1)
    for _ in range(ranks):
        new, present = divmod(int(common.argmax()), ranks)
        name[new] = present
        common[new, :], common[:, present] = -1, -1
    return name


@dataclass(frozen=True, slots=True)
class MoveDecision:
    """Whether to move experts.

    Attributes:
        owner: rank of each expert from now on; the old placement where a move does not pay.
        moved: experts that change their rank.
        gain_s: predicted seconds saved until the next decision; 0 without a move.
        cost_s: predicted seconds of the move.
    """

    owner: NDArray[np.int64]
    moved: tuple[int, ...]
    gain_s: float
    cost_s: float


def decide_move(
    load: NDArray,
    old: NDArray,
    profile: Profile,
    shape: ExpertShape,
    grouping: Grouping,
    steps: int,
    margin: float = 1.2,
) -> MoveDecision:
    """Place experts anew where the gain until the next decision exceeds the price of the move.

    Args:
        load: [E] forecast rows of each expert in one step, over all ranks; senders are taken as alike.
        old: [E] present rank of each expert.
        profile: coefficients.
        shape: of one expert.
        grouping: places of the ranks.
        steps: until the next decision.
        margin: how many times the price the gain must be.
    """
    ranks = grouping.ranks
    new = place_experts(load, ranks, old)
    moved = tuple(np.flatnonzero(new != old).tolist())
    if not moved:
        return MoveDecision(np.asarray(old), (), 0.0, 0.0)
    counts = np.rint(np.tile(np.asarray(load, dtype=np.float64) / ranks, (ranks, 1))).astype(np.int64)
    before, after = (layer_time(profile, shape, grouping, work_of(counts, p)).total_s for p in (old, new))
    gain = steps * (before - after)
    cost = move_s(profile, shape, grouping, np.asarray(old), new)
    if gain <= margin * cost:
        return MoveDecision(np.asarray(old), (), 0.0, cost)
    return MoveDecision(new, moved, gain, cost)


def move_s(
    profile: Profile, shape: ExpertShape, grouping: Grouping, old: NDArray, new: NDArray, master_bytes: int = 4
) -> float:
    """Seconds to carry experts, their master weights and AdamW's moments to their new ranks, in one exchange."""
    ranks = grouping.ranks
    moves = np.zeros((ranks, ranks))
    np.add.at(moves, (old, new), 1.0)
    node = grouping.node_of()
    same = node[:, None] == node[None, :]
    each = shape.parameters * (master_bytes + MOMENT_BYTES)
    near, far = moves * (same & ~np.eye(ranks, dtype=bool)), moves * ~same
    inside, between = (np.maximum(m.sum(0), m.sum(1)) * each for m in (near, far))
    return float(exchange_s(profile, grouping, inside, between))
