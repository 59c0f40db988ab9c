from __future__ import annotations

import time

import numpy as np
import pytest
from scipy.optimize import linprog

from moeflow.errors import ConfigError
from moeflow.plan.balance import balance_step
from moeflow.plan.cost import ExpertShape, Grouping
from moeflow.plan.profile import DEFAULTS
from moeflow.plan.replicas import assign_rows, plan_replicas, split_rows, split_totals, work_with_replicas
from moeflow.plan.shadow import row_costs
from moeflow.plan.traces import zipf


def loads(seed, experts, skew=1.2, rows=100_000):
    rng = np.random.default_rng(seed)
    return rng.multinomial(rows, zipf(experts, skew, rng))


def busiest(plan, totals, base=None):
    busy = np.zeros(plan.ranks) if base is None else np.array(base, dtype=float)
    for hosts, rows in zip(plan.hosts, split_totals(totals.tolist(), plan, base)):
        np.add.at(busy, list(hosts), rows)
    return busy.max()


@pytest.mark.parametrize(("experts", "ranks", "slots"), [(32, 16, 3), (32, 8, 5), (64, 16, 5), (8, 8, 2), (12, 4, 4)])
@pytest.mark.parametrize("skew", [0.0, 0.8, 1.2, 2.0])
def test_one_spare_slot_a_rank_splits_a_known_load_evenly(experts, ranks, slots, skew):
    for seed in range(5):
        load = loads(seed, experts, skew)
        plan = plan_replicas(load, ranks, slots)
        assert [len(s) <= slots for s in plan.slots()] == [True] * ranks
        assert all(len(hosts) >= 1 for hosts in plan.hosts)
        assert busiest(plan, load) / (load.sum() / ranks) < 1.01


def test_without_spare_slots_each_expert_has_one_host():
    plan = plan_replicas(loads(0, 16), 4, 4)
    assert [len(h) for h in plan.hosts] == [1] * 16
    assert [len(s) for s in plan.slots()] == [4] * 4


def test_slots_that_do_not_suffice():
    with pytest.raises(ConfigError, match="do not hold 32 experts"):
        plan_replicas(loads(0, 32), 4, 7)


def test_a_rank_that_could_hold_everything():
    plan = plan_replicas(loads(0, 4), 4, 6)
    assert all(len(set(s)) == len(s) for s in plan.slots())
    assert busiest(plan, loads(1, 4)) <= 1.01 * 25_000


@pytest.mark.parametrize("seed", range(20))
def test_the_split_of_a_drifted_load_is_near_the_linear_program(seed):
    """Oracle: scipy's linear program for the least possible maximum over all splits."""
    ranks = (4, 8, 16)[seed % 3]
    experts = 2 * ranks
    rng = np.random.default_rng(seed)
    plan = plan_replicas(loads(seed, experts), ranks, 3)
    now = rng.multinomial(100_000, rng.dirichlet(30 * loads(seed, experts) / 1e5 + 0.01))
    pairs = [(e, r) for e, hosts in enumerate(plan.hosts) for r in hosts]
    upper = np.zeros((ranks, len(pairs) + 1))
    upper[:, -1] = -1
    equal = np.zeros((experts, len(pairs) + 1))
    for column, (expert, rank) in enumerate(pairs):
        upper[rank, column], equal[expert, column] = 1, 1
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1
    optimum = linprog(cost, upper, np.zeros(ranks), equal, now).fun
    assert optimum - 1 <= busiest(plan, now) <= max(optimum * 1.04, now.sum() / ranks * 1.01)


def test_split_totals_levels_around_what_ranks_have_anyway():
    load = loads(4, 16)
    plan = plan_replicas(load, 8, 4)
    base = [20_000, *[0] * 7]
    parts = split_totals(load.tolist(), plan, base)
    assert [sum(p) for p in parts] == load.tolist()
    assert min(min(p) for p in parts) >= 0
    assert busiest(plan, load, base) <= busiest(plan, load) + 20_000
    assert busiest(plan, load, base) < 20_000 + load.sum() / 8


@pytest.mark.parametrize("seed", range(5))
def test_every_row_goes_to_one_host_of_its_expert(seed):
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(5000, zipf(32, 1.2, rng), size=8)
    plan = plan_replicas(counts.sum(0), 8, 5)
    now = rng.multinomial(5000, zipf(32, 1.0, rng), size=8)
    moves = split_rows(now, plan)
    assert (moves.sum(2) == now).all()
    assert moves.min() >= 0
    for expert, hosts in enumerate(plan.hosts):
        elsewhere = np.delete(moves[:, expert], list(hosts), axis=1)
        assert elsewhere.sum() == 0
    work = work_with_replicas(moves)
    assert work.rows.sum() == now.sum() == work.moves.sum()


def test_a_rank_serves_itself_first():
    counts, room = np.array([[10], [20], [30]]), np.array([[25, 0, 35]])
    moves = assign_rows(counts, room)
    assert moves[:, 0].tolist() == [[10, 0, 0], [15, 0, 5], [0, 0, 30]]


def test_ranks_decide_alike_and_repeatably():
    counts = np.random.default_rng(0).multinomial(9000, zipf(32, 1.2, np.random.default_rng(1)), size=16)
    plans = [plan_replicas(counts.sum(0), 16, 3) for _ in range(2)]
    assert plans[0] == plans[1]
    assert (split_rows(counts, plans[0]) == split_rows(counts.astype(np.int32), plans[1])).all()


def test_shadows_on_top_take_what_replicas_cannot():
    """The forecast was of another law: replicas stand wrong, and shadows must make up for it."""
    rng = np.random.default_rng(3)
    before, now = (rng.multinomial(16384, zipf(32, 1.4, rng), size=16) for _ in range(2))
    plan = plan_replicas(before.sum(0), 16, 3)
    costs = row_costs(DEFAULTS["a100"], ExpertShape(1536, 3072, dtype="bf16"), Grouping(16, 16), 32)
    plain, shadowed = (balance_step(now, plan, costs, shadow=on) for on in (False, True))
    assert plain.work.imbalance > 2.0
    assert shadowed.shadows.experts
    assert shadowed.work.imbalance < 1.2
    assert shadowed.work.rows.sum() == now.sum()
    for expert in shadowed.shadows.experts:
        assert shadowed.work.rows[:, expert].tolist() == now[:, expert].tolist()
        assert shadowed.moves[:, expert].sum() == 0


def test_a_step_without_replicas_is_shadows_alone():
    counts = np.random.default_rng(0).multinomial(16384, zipf(32, 1.4, np.random.default_rng(1)), size=8)
    costs = row_costs(DEFAULTS["a100"], ExpertShape(1536, 3072, dtype="bf16"), Grouping(8, 8), 32)
    found = balance_step(counts, np.arange(32) // 4, costs)
    assert found.moves is None
    assert found.work.imbalance < balance_step(counts, np.arange(32) // 4, costs, shadow=False).work.imbalance


def test_a_split_takes_well_under_a_millisecond():
    rng = np.random.default_rng(0)
    counts = rng.multinomial(16384, zipf(64, 1.2, rng), size=16)
    plan = plan_replicas(counts.sum(0), 16, 5)
    now = rng.multinomial(16384, rng.dirichlet(counts.sum(0) / 1000 + 0.1), size=16)
    spent = []
    for _ in range(30):
        started = time.process_time()
        split_rows(now, plan)
        spent.append(time.process_time() - started)
    assert np.median(spent) < 2e-3  # 0.3 ms on an idle machine
