"""Which experts to shadow in a step: broadcast to all ranks of the group, so that each computes its own rows.

FasterMoE's idea (He et al., PPoPP 2022) with its cost model put right:

* A rank computes its own rows of every shadowed expert: sum over w of T_we counts, not an even share.
* Rows whose expert is local are not sent.
* Senders count as well as receivers, and links inside and between nodes apart.
* The price of a shadow is that of one broadcast and one reduction, as the profile says for the group's size.

Decisions are whole-number arithmetic (picoseconds, int64) on counts that all ranks share, so that ranks decide the same
on any processor.

Legend: R ranks, E experts, S subsets that are compared at once, Q quantities of which the slowest counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeflow.plan.cost import ExpertShape, Grouping
from moeflow.plan.layer_cost import EXCHANGES, shadow_s, shadows_s
from moeflow.plan.profile import Profile

Ints = NDArray[np.int64]

_PS = 1e12
#: Experts of which two at once are added, dropped or swapped; more would not stay far below a millisecond.
_PAIRED = 16


@dataclass(frozen=True, slots=True)
class RowCosts:
    """What one row and one shadow cost, in whole picoseconds, forward and backward together.

    Attributes:
        compute_ps: to compute one row.
        inside_ps: to carry one row inside a node (all four all-to-alls).
        between_ps: to carry one row between nodes.
        shadow_ps: one more shadowed expert.
        all_ps: all experts shadowed, which is data-parallel execution of the layer.
        per_node: ranks of the group on each node.
        shared_nic: whether the rows of a node's ranks share one link to other nodes.
        overlapped: computation and exchange run side by side: the longer counts, not the sum.
    """

    compute_ps: int
    inside_ps: int
    between_ps: int
    shadow_ps: int
    all_ps: int
    per_node: int
    shared_nic: bool = False
    overlapped: bool = False


@dataclass(frozen=True, slots=True)
class ShadowChoice:
    """What was decided.

    Attributes:
        experts: shadowed, ascending.
        before_ps: predicted without any shadow.
        after_ps: predicted with these.
    """

    experts: tuple[int, ...]
    before_ps: int
    after_ps: int

    @property
    def gain_s(self) -> float:
        """Seconds that the choice saves."""
        return (self.before_ps - self.after_ps) / _PS


def row_costs(
    profile: Profile,
    shape: ExpertShape,
    grouping: Grouping,
    experts: int,
    micro_batches: int = 1,
    overlapped: bool = False,
) -> RowCosts:
    """Linear costs for the policy, from the same coefficients as the whole model.

    Args:
        profile: must be the same on all ranks (broadcast it).
        shape: of one expert.
        grouping: places of the ranks.
        experts: E.
        micro_batches: forward passes that share one broadcast and one reduction.
        overlapped: whether the exchange runs beside the computation.
    """
    row = 3 * shape.row_flops / profile.rate(shape.dtype)
    row += shape.row_bytes * profile.row_passes / profile.memory_bytes_per_s
    wire = EXCHANGES * shape.row_bytes
    return RowCosts(
        round(row * _PS),
        round(wire / profile.inside.bytes_per_s * _PS),
        round(wire / profile.between.bytes_per_s * _PS),
        round(shadow_s(profile, shape, grouping) / micro_batches * _PS),
        round(shadows_s(profile, shape, grouping, experts, experts) / micro_batches * _PS),
        grouping.per_node,
        profile.shared_nic,
        overlapped,
    )


class ShadowProblem:
    """One layer's counts, ready to tell the time of any set of shadows.

    Args:
        counts: int [R, E] rows that each rank has for each expert, the same on all ranks.
        owner: int [E] rank that holds each expert.
        costs: of rows and shadows.
        rows: [E, R] rows of each expert that each rank computes unless it is shadowed; None gives all to the owner.
            With replicas: what `replicas.split_rows` gave.
        moves: [R, E, R] rows by sender, expert and receiver unless shadowed; None sends all to the owner.
    """

    def __init__(
        self, counts: NDArray, owner: NDArray, costs: RowCosts, rows: Ints | None = None, moves: Ints | None = None
    ):
        self.costs = costs
        counts_ER = np.ascontiguousarray(np.asarray(counts, dtype=np.int64).T)
        self.totals = counts_ER.sum(1)
        if rows is None:
            rows = np.zeros_like(counts_ER)
            rows[np.arange(len(rows)), owner] = self.totals
        parts = [(counts_ER - rows) * costs.compute_ps]
        parts += _sent(counts_ER, owner, costs) if moves is None else _moved(moves, costs)
        # change[e]: what shadowing e adds to each quantity of each rank; base: the quantities without shadows.
        self.change = np.stack(parts, axis=1)
        self.base = -self.change.sum(0)
        self.base[0] += counts_ER.sum(0) * costs.compute_ps

    def time_ps(self, state_SQR: Ints, num_shadows: NDArray | int) -> Ints:
        """[S] picoseconds of states (base plus the changes of the shadowed experts)."""
        worst = state_SQR.max(-1)
        wire = worst[:, 1:].max(-1) if worst.shape[1] > 1 else 0
        busy = np.maximum(worst[:, 0], wire) if self.costs.overlapped else worst[:, 0] + wire
        price = np.where(num_shadows == len(self.totals), self.costs.all_ps, num_shadows * self.costs.shadow_ps)
        return busy + price

    def time_of(self, experts: tuple[int, ...]) -> int:
        """Picoseconds with one set of shadows."""
        state = self.base + self.change[list(experts)].sum(0)
        return int(self.time_ps(state[None], len(experts))[0])

    def least_ps(self) -> int:
        """No set of shadows is faster than this: the busiest rank has at least the mean of what must be left."""
        ranks, experts = self.base.shape[1], len(self.totals)
        computed = int(self.base[0].sum()) // ranks  # rows are computed somewhere, whatever is shadowed
        price = np.arange(1, experts + 1) * self.costs.shadow_ps
        price[-1] = self.costs.all_ps
        if len(self.base) == 1:
            return computed + int(price.min())
        # Most that k shadows can take from each quantity: its k largest parts.
        taken = np.cumsum(np.sort(self.change[:, 1:].sum(-1), axis=0), axis=0)
        wire = ((self.base[1:].sum(-1) + taken) // ranks).max(-1)
        busy = np.maximum(wire, computed) if self.costs.overlapped else wire + computed
        return int((busy + price).min())

    def best_prefix(self) -> tuple[int, ...]:
        """The best of: nothing, the hottest expert, the two hottest, and so on."""
        order = np.argsort(-self.totals, kind="stable")
        states = self.base + np.cumsum(self.change[order], axis=0)
        times = self.time_ps(states, np.arange(1, len(order) + 1))
        best = int(times.argmin())
        return tuple(order[: best + 1].tolist()) if times[best] < self.time_of(()) else ()

    def improve(self, start: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Add, drop or swap one or two experts as long as that helps; returns (experts, picoseconds)."""
        chosen = np.zeros(len(self.totals), dtype=bool)
        chosen[list(start)] = True
        state = self.base + self.change[chosen].sum(0)
        now = int(self.time_ps(state[None], int(chosen.sum()))[0])
        while True:
            sign = np.where(chosen, -1, 1)
            times = self.time_ps(state + sign[:, None, None] * self.change, chosen.sum() + sign)
            best = int(times.argmin())
            if times[best] < now:
                now = int(times[best])
                state = state + sign[best] * self.change[best]
                chosen[best] = not chosen[best]
                continue
            pair = self._best_pair(state, sign)
            if pair is None or pair[1] >= now:
                return tuple(np.flatnonzero(chosen).tolist()), now
            experts, now = pair
            state = state + (sign[experts, None, None] * self.change[experts]).sum(0)
            chosen[experts] = ~chosen[experts]

    def _best_pair(self, state: Ints, sign: Ints) -> tuple[Ints, int] | None:
        """The best of adding, dropping or swapping two experts at once: two ranks that are equally hot need two."""
        # Shadowed ones first, then by load.
        near = np.lexsort((-self.totals, sign))[:_PAIRED]
        first, second = np.triu_indices(len(near), 1)
        if not len(first):
            return None
        step = sign[near, None, None] * self.change[near]
        sizes = (sign < 0).sum() + sign[near[first]] + sign[near[second]]
        times = self.time_ps(state + step[first] + step[second], sizes)
        best = int(times.argmin())
        return near[[first[best], second[best]]], int(times[best])


def choose_shadows(
    counts: NDArray,
    owner: NDArray,
    costs: RowCosts,
    previous: tuple[int, ...] = (),
    margin: float = 0.03,
    problem: ShadowProblem | None = None,
) -> ShadowChoice:
    """Decide which experts to shadow; the same result on every rank that calls it with the same arguments.

    The best prefix of the experts by load and the previous choice are both improved by adding, dropping and swapping
    one or two experts.  The previous choice stays unless none or another one is better (the other by `margin`), and
    nothing is newly shadowed unless that gains `margin` over none.

    Args:
        counts: int [R, E] rows that each rank has for each expert.
        owner: int [E] rank that holds each expert.
        costs: from `row_costs`.
        previous: choice of the step before.
        margin: share of the step's time that a change must gain.
        problem: of the same counts, where it was made before (with replicas).
    """
    if len(owner) == 0 or len(counts) == 1:
        return ShadowChoice((), 0, 0)
    problem = problem or ShadowProblem(counts, owner, costs)
    none = problem.time_of(())
    previous = tuple(sorted(e for e in previous if e < len(owner)))
    most = none * round(1000 * (1 - margin))  # parts of a thousand keep the comparisons in whole numbers
    if not previous and problem.least_ps() * 1000 > most:
        return ShadowChoice((), none, none)
    starts = dict.fromkeys([problem.best_prefix(), previous, ()])
    found, best = min((problem.improve(start) for start in starts), key=lambda result: (result[1], result[0]))
    kept = problem.time_of(previous)
    if kept <= none and kept * 1000 <= best * round(1000 * (1 + margin)):
        return ShadowChoice(previous, none, kept)
    if best * 1000 > most:
        return ShadowChoice((), none, none)
    return ShadowChoice(found, none, best)


def exhaustive(problem: ShadowProblem) -> tuple[tuple[int, ...], int]:
    """The best of all subsets, for tests and for at most 16 experts; returns (experts, picoseconds)."""
    experts = len(problem.totals)
    assert experts <= 16, "all subsets of more experts do not fit in memory"
    masks = (np.arange(2**experts)[:, None] >> np.arange(experts)) & 1
    states = problem.base + np.tensordot(masks, problem.change, axes=1)
    times = problem.time_ps(states, masks.sum(1))
    best = int(times.argmin())
    return tuple(np.flatnonzero(masks[best]).tolist()), int(times[best])


def _sent(counts_ER: Ints, owner: NDArray, costs: RowCosts) -> list[Ints]:
    """Changes of what ranks send and receive where all rows of an expert go to its owner."""
    experts, ranks = counts_ER.shape
    rank = np.arange(ranks)
    node, home = rank // costs.per_node, np.asarray(owner)
    same = node[home][:, None] == node[None, :]
    each = np.arange(experts)

    def parts(sent: Ints, ps: int, far: bool) -> list[Ints]:
        received = np.zeros_like(sent)
        received[each, home] = sent.sum(1)
        return [-_far(x, costs) * ps if far else -x * ps for x in (sent, received)]

    near = counts_ER * same
    near[each, home] = 0
    found = parts(near, costs.inside_ps, False)
    if costs.per_node < ranks:
        found += parts(counts_ER * ~same, costs.between_ps, True)
    return found


def _moved(moves: Ints, costs: RowCosts) -> list[Ints]:
    """The same for rows that go to several hosts: `moves` is [R, E, R]."""
    ranks = len(moves)
    rank = np.arange(ranks)
    starts, node = np.arange(0, ranks, costs.per_node), rank // costs.per_node
    home = moves[rank, :, rank]  # [R, E]
    near_sent = np.add.reduceat(moves, starts, axis=2)[rank, :, node]
    near_received = np.add.reduceat(moves, starts, axis=0)[node, :, rank]
    found = [-(near - home).T * costs.inside_ps for near in (near_sent, near_received)]
    if costs.per_node < ranks:
        far = (moves.sum(2) - near_sent).T, (moves.sum(0) - near_received.T)
        found += [-_far(np.ascontiguousarray(x), costs) * costs.between_ps for x in far]
    return found


def _far(per_rank_ER: Ints, costs: RowCosts) -> Ints:
    """Rows between nodes, on the link that carries them: the rank's, or its node's (said of each of its ranks)."""
    if not costs.shared_nic:
        return per_rank_ER
    ranks = per_rank_ER.shape[1]
    sums = np.add.reduceat(per_rank_ER, np.arange(0, ranks, costs.per_node), axis=1)
    return sums[:, np.arange(ranks) // costs.per_node]
