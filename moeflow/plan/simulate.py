"""Plays a routing trace through the cost model: what a policy would have cost, on any number of ranks.

Expert-parallel groups of one layer route apart and meet when gradients are reduced, so the slowest group makes the
step. They share plans (placement, replicas), which come from the loads of all of them; splits and shadows are each
group's.

Legend: S steps, G groups, R ranks of a group, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeflow.errors import ConfigError
from moeflow.plan.balance import balance_step
from moeflow.plan.cost import ExpertShape, Grouping, exchange_s, permute_s, products_s, traffic
from moeflow.plan.layer_cost import EXCHANGES, layer_time
from moeflow.plan.placement import decide_move, smooth
from moeflow.plan.profile import Profile
from moeflow.plan.replan import decide_replicas
from moeflow.plan.replicas import ReplicaPlan, plan_replicas
from moeflow.plan.shadow import RowCosts, row_costs
from moeflow.plan.traces import draw_counts, drifting


@dataclass(frozen=True, slots=True)
class Policy:
    """What is done against skew.

    Attributes:
        shadow: broadcast hot experts for a step.
        place: move experts between ranks.
        spare: slots for replicas on each rank; 0 has none.
        interval: steps between plans of placement or replicas.
        decay: weight of the past in their forecast.
        margin: share of a step that a change of shadows must gain.
        horizon: steps over which a move must pay; None is the interval.
    """

    shadow: bool = False
    place: bool = False
    spare: int = 0
    interval: int = 100
    decay: float = 0.5
    margin: float = 0.03
    horizon: int | None = None


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came out, a number for each step.

    Attributes:
        seconds: [S] of the slowest group's layer, with moves in the steps that made them.
        imbalance: [S] rows of the busiest rank over the mean, mean over groups.
        shadows: [S] experts shadowed, mean over groups.
        moved: [S] experts (or replicas) that changed their rank.
    """

    seconds: NDArray[np.float64]
    imbalance: NDArray[np.float64]
    shadows: NDArray[np.float64]
    moved: NDArray[np.int64]

    @property
    def mean_s(self) -> float:
        """Mean seconds of a step."""
        return float(self.seconds.mean())


class Simulator:
    """One MoE layer on one kind of group.

    Args:
        profile: coefficients.
        shape: of one expert.
        grouping: places of the ranks of a group.
        hierarchical: two-hop all-to-all.
    """

    def __init__(self, profile: Profile, shape: ExpertShape, grouping: Grouping, hierarchical: bool = False):
        self.profile, self.shape, self.grouping = profile, shape, grouping
        self.hierarchical = hierarchical

    def run(self, steps: Iterable[NDArray], policy: Policy) -> Simulated:
        """Play steps.

        Args:
            steps: int counts [G, R, E] (or [R, E] for one group) of each step.
            policy: what is done.

        Raises:
            ConfigError: the ranks do not fit, or experts do not divide over them.
        """
        rows = [self._step(counts, policy, state) for counts, state in _with_state(steps, self, policy)]
        seconds, imbalance, shadows, moved = zip(*rows)
        return Simulated(np.array(seconds), np.array(imbalance), np.array(shadows), np.array(moved))

    def _step(self, counts: NDArray, policy: Policy, state: _State) -> tuple[float, float, float, int]:
        moved, price = state.plan(counts, policy)
        if not policy.shadow and policy.spare == 0:
            seconds, imbalance = self.plain(counts, state.owner)
            found = (float(seconds.max()), float(imbalance.mean()), 0.0)
        else:
            found = self._balanced(counts, policy, state)
        state.learn(counts, policy)
        return found[0] + price, found[1], found[2], moved

    def plain(self, counts: NDArray, owner: NDArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """All groups at once: ([G] seconds, [G] imbalance) where all rows of an expert go to its owner.

        Args:
            counts: int [G, R, E].
            owner: int [E] rank of each expert, equally many on each.
        """
        groups, ranks, experts = counts.shape
        order = np.argsort(owner, kind="stable")
        sorted_counts = counts[..., order]
        local = experts // ranks
        moves = sorted_counts.reshape(groups, ranks, ranks, local).sum(-1)
        loads = sorted_counts.sum(1).reshape(groups, ranks, local)
        per_rank = loads.sum(-1).astype(np.float64)
        compute = products_s(self.profile, self.shape, loads.astype(np.float64)).sum(-1)
        compute = (compute + permute_s(self.profile, self.shape, per_rank)).max(-1)
        inside, between = traffic(moves, self.grouping, self.shape.row_bytes)
        exchange = exchange_s(self.profile, self.grouping, inside, between, self.hierarchical)
        mean = np.maximum(per_rank.mean(-1), 1e-12)
        return compute + (EXCHANGES * exchange if ranks > 1 else 0.0), per_rank.max(-1) / mean

    def _balanced(self, counts: NDArray, policy: Policy, state: _State) -> tuple[float, float, float]:
        plan = state.owner if state.replicas is None else state.replicas
        hosts = None if state.replicas is None else state.replicas.replicated()
        seconds, imbalance, shadows = 0.0, 0.0, 0
        for group, own in enumerate(counts):
            previous = state.shadows.get(group, ())
            found = balance_step(own, plan, state.costs, previous, policy.margin, policy.shadow)
            chosen = found.shadows.experts
            state.shadows[group] = chosen
            time = layer_time(
                self.profile, self.shape, self.grouping, found.work, len(chosen), hosts, self.hierarchical
            )
            seconds = max(seconds, time.total_s)
            imbalance += time.imbalance
            shadows += len(chosen)
        return seconds, imbalance / len(counts), shadows / len(counts)


class _State:
    """What a policy remembers from step to step."""

    def __init__(self, simulator: Simulator, experts: int):
        self.simulator = simulator
        self.costs: RowCosts = row_costs(simulator.profile, simulator.shape, simulator.grouping, experts)
        self.owner = np.arange(experts) * simulator.grouping.ranks // experts
        self.replicas: ReplicaPlan | None = None
        self.history: NDArray[np.float64] | None = None
        self.shadows: dict[int, tuple[int, ...]] = {}
        self.steps = 0

    def plan(self, counts: NDArray, policy: Policy) -> tuple[int, float]:
        """Plan anew where it is time; returns (experts moved, seconds of the move)."""
        due = self.steps % policy.interval == 0
        ranks = self.simulator.grouping.ranks
        if policy.spare:
            if self.replicas is None and self.history is None:
                # Nothing is known yet: any placement is as good, and spare slots wait.
                self.replicas = plan_replicas(np.ones(counts.shape[-1]), ranks, counts.shape[-1] // ranks)
            elif due and self.history is not None:
                slots = counts.shape[-1] // ranks + policy.spare
                return self._replicate(self.history, slots, policy.horizon or policy.interval)
        elif policy.place and due and self.history is not None:
            sim = self.simulator
            horizon = policy.horizon or policy.interval
            found = decide_move(self.history, self.owner, sim.profile, sim.shape, sim.grouping, horizon)
            self.owner = found.owner
            return len(found.moved), found.cost_s if found.moved else 0.0
        return 0, 0.0

    def _replicate(self, load: NDArray, slots: int, steps: int) -> tuple[int, float]:
        sim = self.simulator
        assert self.replicas is not None, "made before the first step"
        found = decide_replicas(load, self.replicas, slots, sim.profile, sim.shape, sim.grouping, steps)
        self.replicas = found.plan
        return len(found.copied), found.cost_s if found.copied else 0.0

    def learn(self, counts: NDArray, policy: Policy) -> None:
        """Add a step's loads to the history: those of one group, on average."""
        self.history = smooth(self.history, counts.sum(1).mean(0), policy.decay)
        self.steps += 1


def _with_state(steps: Iterable[NDArray], simulator: Simulator, policy: Policy) -> Iterator[tuple[NDArray, _State]]:
    state: _State | None = None
    for counts in steps:
        counts = np.asarray(counts)
        counts = counts[None] if counts.ndim == 2 else counts
        if counts.shape[1] != simulator.grouping.ranks or counts.shape[2] % counts.shape[1]:
            raise ConfigError(
                f"counts of {counts.shape[1]} ranks and {counts.shape[2]} experts do not fit a group of "
                f"{simulator.grouping.ranks} ranks",
                "as many ranks as the group has, and experts that divide over them",
            )
        state = state or _State(simulator, counts.shape[2])
        yield counts, state
    if state is None:
        raise ConfigError("the trace has no steps", "at least one")


def synthetic_steps(
    groups: int, ranks: int, experts: int, rows: int, steps: int, skew: float = 1.0, drift: float = 0.0, seed: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Counts [G, R, E] of each step: all ranks draw from one drifting Zipf law.

    Args:
        groups: G.
        ranks: R.
        experts: E.
        rows: of each rank in a step (tokens * top_k).
        steps: how many.
        skew: Zipf exponent; 0 is even.
        drift: deviation of a step of the shares' logarithms.
        seed: of chance.
    """
    rng = np.random.default_rng(seed)
    walk = drifting(experts, skew, drift, rng)
    for _ in range(steps):
        yield draw_counts(next(walk), groups * ranks, rows, rng).reshape(groups, ranks, experts)
