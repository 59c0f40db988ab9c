from __future__ import annotations

import itertools

import numpy as np
import pytest

from moeflow.errors import ConfigError
from moeflow.plan.cost import ExpertShape, Grouping
from moeflow.plan.placement import decide_move, keep_names, move_s, place_experts, smooth
from moeflow.plan.profile import DEFAULTS
from moeflow.plan.traces import zipf

SHAPE = ExpertShape(512, 1024, dtype="bf16")


def busiest(load, owner, ranks):
    return np.bincount(owner, load, minlength=ranks).max()


@pytest.mark.parametrize("seed", range(10))
def test_placement_is_near_the_best_of_all(seed):
    load = np.random.default_rng(seed).pareto(1.5, 8)
    owner = place_experts(load, 4)
    assert np.bincount(owner, minlength=4).tolist() == [2, 2, 2, 2]
    best = min(
        busiest(load, np.array(p), 4) for p in set(itertools.permutations([0, 0, 1, 1, 2, 2, 3, 3])) if p[0] == 0
    )
    assert best <= busiest(load, owner, 4) * (1 + 1e-9)
    assert busiest(load, owner, 4) <= 1.05 * best


def test_renaming_keeps_experts_where_they_are():
    old = np.array([2, 2, 0, 0, 1, 1])
    assert keep_names(np.array([0, 0, 1, 1, 2, 2]), old, 3).tolist() == old.tolist()
    load = zipf(32, 1.0, np.random.default_rng(0))
    first = place_experts(load, 8)
    again = place_experts(load, 8, old=(first + 3) % 8)
    assert again.tolist() == ((first + 3) % 8).tolist()


def test_experts_that_do_not_divide():
    with pytest.raises(ConfigError, match="10 experts do not divide over 4"):
        place_experts(np.ones(10), 4)


def test_history_fades():
    history = smooth(None, np.array([8.0, 0.0]))
    for _ in range(30):
        history = smooth(history, np.array([0.0, 8.0]))
    assert history == pytest.approx([0.0, 8.0], abs=1e-6)
    assert smooth(np.array([4.0]), np.array([8.0]), decay=0.75) == pytest.approx([5.0])


def test_a_move_must_earn_its_price_before_the_next_decision():
    load = 40_000 * zipf(32, 1.0, np.random.default_rng(1))
    old, group = np.arange(32) // 4, Grouping(8, 8)
    few = decide_move(load, old, DEFAULTS["a100"], SHAPE, group, steps=1)
    many = decide_move(load, old, DEFAULTS["a100"], SHAPE, group, steps=10_000)
    assert few.moved == () and few.owner.tolist() == old.tolist() and few.cost_s > 0
    assert many.moved and busiest(load, many.owner, 8) < busiest(load, old, 8)
    assert many.gain_s > many.cost_s > 0
    steady = decide_move(load, many.owner, DEFAULTS["a100"], SHAPE, group, steps=10_000)
    assert steady.moved == ()


def test_the_price_counts_masters_and_moments():
    old, new = np.array([0, 1]), np.array([1, 0])
    price = move_s(DEFAULTS["a100"], SHAPE, Grouping(2, 2), old, new)
    link = DEFAULTS["a100"].inside
    assert price == pytest.approx(2 * 512 * 1024 * 12 / link.bytes_per_s + link.latency_s)
