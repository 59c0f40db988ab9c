from __future__ import annotations

import time

import numpy as np
import pytest

from moeflow.errors import ConfigError
from moeflow.plan.cost import ExpertShape, Grouping
from moeflow.plan.layer_cost import layer_time, work_of
from moeflow.plan.profile import DEFAULTS
from moeflow.plan.simulate import Policy, Simulator, synthetic_steps

SHAPE = ExpertShape(2048, 4096, True, "bf16", 2, 4)
ALL = [Policy(), Policy(shadow=True), Policy(place=True), Policy(spare=1), Policy(shadow=True, spare=1)]


def simulator(ranks=8, nodes=1, device="h100"):
    return Simulator(DEFAULTS[device], SHAPE, Grouping(ranks, ranks // nodes))


@pytest.mark.parametrize("nodes", [1, 2])
def test_all_groups_at_once_are_each_group_alone(nodes):
    sim = simulator(nodes=nodes)
    counts = next(iter(synthetic_steps(5, 8, 16, 4096, 1, skew=1.0)))
    owner = np.random.default_rng(0).permutation(np.arange(16) // 2)
    seconds, imbalance = sim.plain(counts, owner)
    for group in range(5):
        alone = layer_time(sim.profile, SHAPE, sim.grouping, work_of(counts[group], owner))
        assert seconds[group] == pytest.approx(alone.total_s)
        assert imbalance[group] == pytest.approx(alone.imbalance)


def test_every_policy_helps_where_routing_is_skewed_and_lasting():
    times = {}
    for policy in ALL:
        steps = synthetic_steps(2, 8, 32, 16384, 12, skew=1.2)
        found = simulator().run(
            steps, Policy(**{**{f: getattr(policy, f) for f in ("shadow", "place", "spare")}, "interval": 4})
        )
        times[policy.shadow, policy.place, policy.spare] = found.seconds[5:].mean()
    none = times.pop((False, False, 0))
    assert all(seconds < 0.97 * none for seconds in times.values())
    assert times[True, False, 1] == min(times.values())


def test_even_routing_costs_nothing():
    runs = [simulator().run(synthetic_steps(1, 8, 32, 16384, 6, skew=0.0), policy) for policy in ALL[:3]]
    assert runs[1].shadows.max() == 0
    assert runs[2].moved.sum() == 0
    assert all(run.mean_s <= 1.001 * runs[0].mean_s for run in runs)


def test_placement_follows_a_drift_and_pays_for_its_moves():
    steps = list(synthetic_steps(1, 8, 32, 16384, 40, skew=1.0, drift=0.1))
    still = simulator().run(steps, Policy())
    moving = simulator().run(steps, Policy(place=True, interval=10))
    assert moving.moved.sum() > 0
    assert moving.imbalance[1:].mean() < still.imbalance[1:].mean()
    at = int(np.flatnonzero(moving.moved)[0])
    owner_only = simulator().plain(steps[at][None] if steps[at].ndim == 2 else steps[at], np.arange(32) // 4)[0].max()
    assert moving.seconds[at] != pytest.approx(owner_only)


@pytest.mark.parametrize("groups", [160, pytest.param(1563, marks=pytest.mark.slow)])
def test_a_hundred_thousand_ranks_in_seconds(groups):
    started = time.process_time()
    sim = simulator(ranks=64, nodes=8)
    found = sim.run(synthetic_steps(groups, 64, 128, 8192, 2, skew=0.8, drift=0.02), Policy())
    assert time.process_time() - started < 20
    assert found.seconds.shape == (2,)
    assert found.imbalance.min() > 1.5


def test_shapes_that_do_not_fit():
    with pytest.raises(ConfigError, match="counts of 4 ranks and 16 experts"):
        simulator().run([np.ones((4, 16), dtype=int)], Policy())
    with pytest.raises(ConfigError, match="no steps"):
        simulator().run([], Policy())
