from __future__ import annotations

import numpy as np
import pytest

from moeflow.plan.cost import ExpertShape, Grouping
from moeflow.plan.profile import DEFAULTS
from moeflow.plan.replan import decide_replicas, keep_hosts, replan_s
from moeflow.plan.replicas import ReplicaPlan, plan_replicas, split_rows, work_with_replicas
from moeflow.plan.traces import zipf

SHAPE, GROUP, PROFILE = ExpertShape(2048, 4096, True, "bf16", 2, 4), Grouping(8, 8), DEFAULTS["h100"]


def load(seed, skew=1.2):
    return 100_000 * zipf(32, skew, np.random.default_rng(seed))


def copies(new, old):
    return sum(len(set(a) - set(b)) for a, b in zip(new.hosts, old.hosts))


def imbalance(plan, loads):
    counts = np.rint(np.tile(loads / 8, (8, 1))).astype(int)
    return work_with_replicas(split_rows(counts, plan)).imbalance


def renamed(plan, shift):
    hosts = tuple(tuple((rank + shift) % plan.ranks for rank in h) for h in plan.hosts)
    return ReplicaPlan(plan.ranks, hosts, plan.shares)


def test_the_same_plan_under_other_names_moves_nothing():
    old = plan_replicas(load(0), 8, 5)
    back = keep_hosts(renamed(old, 3), old)
    assert [set(h) for h in back.hosts] == [set(h) for h in old.hosts]
    assert [h[0] for h in back.hosts] == [h[0] for h in old.hosts]
    assert all(
        dict(zip(a, s)) == pytest.approx(dict(zip(b, t)))
        for a, s, b, t in zip(back.hosts, back.shares, old.hosts, old.shares)
    )


@pytest.mark.parametrize("seed", range(5))
def test_renaming_changes_the_names_alone(seed):
    old, new = (
        plan_replicas(load(seed), 8, 5),
        plan_replicas(load(seed) * np.random.default_rng(9).uniform(0.5, 2, 32), 8, 5),
    )
    kept = keep_hosts(new, old)
    assert copies(kept, old) <= copies(new, old)
    assert sorted(map(len, kept.slots())) == sorted(map(len, new.slots()))
    assert [len(h) for h in kept.hosts] == [len(h) for h in new.hosts]
    assert imbalance(kept, load(seed)) == pytest.approx(imbalance(new, load(seed)), rel=0.02)


def test_replicas_must_earn_their_price():
    old = plan_replicas(np.ones(32), 8, 4)
    few, many = (decide_replicas(load(1) / 3, old, 5, PROFILE, SHAPE, GROUP, steps) for steps in (1, 1000))
    assert few.plan is old and few.copied == () and few.cost_s > 0
    assert many.gain_s > many.cost_s > 0
    assert imbalance(many.plan, load(1)) < 1.02 < imbalance(old, load(1))
    assert {e for e, _ in many.copied} >= set(many.owned)
    again = decide_replicas(load(1) / 3, many.plan, 5, PROFILE, SHAPE, GROUP, 1000)
    assert again.copied == () and again.owned == ()


def test_the_price_by_hand():
    old = ReplicaPlan(2, ((0,), (1,)), ((1.0,), (1.0,)))
    new = ReplicaPlan(2, ((0, 1), (0,)), ((0.5, 0.5), (1.0,)))
    # Expert 0 is copied to rank 1; expert 1 and its optimizer state move to rank 0, at the same time.
    expected = SHAPE.parameters * (2 + 12) / PROFILE.inside.bytes_per_s + PROFILE.inside.latency_s
    assert replan_s(PROFILE, SHAPE, Grouping(2, 2), old, new) == pytest.approx(expected)
