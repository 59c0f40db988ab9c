"""The model against slow loops over single rows and messages, and against its own limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeflow.plan.cost import (
    ExpertShape,
    Grouping,
    all_gather_s,
    all_reduce_s,
    broadcast_s,
    exchange_s,
    products_s,
    traffic,
)
from moeflow.plan.layer_cost import EXCHANGES, layer_time, shadow_s, work_of
from moeflow.plan.profile import DEFAULTS, Link

PROFILE = replace(DEFAULTS["a100"], half_rows=0.0, launch_s=0.0)
SHAPE = ExpertShape(64, 256, dtype="bf16")


def random_case(seed, ranks=4, experts=8):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 500, (ranks, experts)), rng.integers(0, ranks, experts), rng


def test_products_of_many_rows_run_at_the_rate():
    seconds = products_s(PROFILE, SHAPE, 10**6)
    assert seconds == pytest.approx(3 * 2 * 2 * 64 * 256 * 10**6 / PROFILE.rate("bf16"))
    assert products_s(PROFILE, SHAPE, 10**6, backward=False) == pytest.approx(seconds / 3)
    assert products_s(PROFILE, replace(SHAPE, gated=True), 10**6) == pytest.approx(seconds * 1.5)
    assert products_s(PROFILE, replace(SHAPE, dtype="fp32"), 10**6) == pytest.approx(2 * seconds)


def test_products_of_few_rows_read_the_weights_or_start_kernels():
    assert products_s(PROFILE, SHAPE, 1) == pytest.approx(3 * 2 * 64 * 256 * 2 / PROFILE.memory_bytes_per_s)
    assert products_s(PROFILE, SHAPE, 0) == 0.0
    assert products_s(replace(PROFILE, launch_s=1.0), SHAPE, 1) == pytest.approx(6.0, rel=1e-6)
    slow = replace(PROFILE, half_rows=1000.0)
    assert products_s(slow, SHAPE, 1000) == pytest.approx(2 * products_s(PROFILE, SHAPE, 1000))


@pytest.mark.parametrize("shadows", [(), (0,), (1, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_work_of_is_a_loop_over_rows(seed, shadows):
    counts, owner, _ = random_case(seed)
    work = work_of(counts, owner, shadows)
    rows, moves = np.zeros_like(work.rows), np.zeros_like(work.moves)
    for rank in range(4):
        for expert in range(8):
            to = rank if expert in shadows else owner[expert]
            rows[to, expert] += counts[rank, expert]
            if expert not in shadows:
                moves[rank, to] += counts[rank, expert]
    assert (work.rows == rows).all()
    assert (work.moves == moves).all()
    assert work.rows.sum() == counts.sum()


def test_traffic_leaves_out_what_stays_at_home():
    moves = np.array([[5, 1, 2, 3], [0, 9, 4, 0], [7, 0, 8, 1], [0, 6, 2, 7]])
    inside, between = traffic(moves, Grouping(4, 2), 10.0)
    near = np.array([[0, 1], [0, 0]]), np.array([[0, 1], [2, 0]])
    assert inside.tolist() == [10 * max(m.sum(0)[i], m.sum(1)[i]) for m in near for i in (0, 1)]
    far_sent, far_received = [5, 4, 7, 6], [7, 6, 6, 3]
    assert between.tolist() == [10 * max(pair) for pair in zip(far_sent, far_received)]


def test_exchange_takes_the_busiest_rank_and_the_slower_link():
    group = Grouping(4, 2)
    inside, between = np.array([1e9, 0, 0, 0]), np.array([0, 2e9, 0, 1e9])
    flat = exchange_s(PROFILE, group, inside, between)
    assert flat == pytest.approx(2e9 / PROFILE.between.bytes_per_s, rel=1e-2)
    shared = exchange_s(replace(PROFILE, shared_nic=True), group, inside, np.array([1e9, 1e9, 0, 0]))
    assert shared == pytest.approx(2e9 / PROFILE.between.bytes_per_s, rel=1e-2)


def test_two_hops_pay_off_where_messages_are_small_and_peers_are_many():
    group = Grouping(256, 8)
    small, large = np.full(256, 1e4), np.full(256, 1e9)
    assert exchange_s(PROFILE, group, small, small, True) < exchange_s(PROFILE, group, small, small)
    assert exchange_s(PROFILE, group, large, large, True) > exchange_s(PROFILE, group, large, large)
    one_node = Grouping(8, 8)
    assert exchange_s(PROFILE, one_node, small[:8], small[:8] * 0, True) == pytest.approx(
        exchange_s(PROFILE, one_node, small[:8], small[:8] * 0)
    )


def test_broadcast_grows_with_the_group_only_where_the_profile_says_so():
    link = Link(0.0, 1e9)
    assert broadcast_s(PROFILE, link, 64, 1e9) == pytest.approx(1.0) == broadcast_s(PROFILE, link, 2, 1e9)
    tree = replace(PROFILE, tree_growth=1.0)
    assert broadcast_s(tree, link, 64, 1e9) == pytest.approx(6.0)
    assert broadcast_s(PROFILE, link, 1, 1e9) == 0.0


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    link = Link(1e-6, 1e9)
    assert all_reduce_s(link, 8, 1e6) == pytest.approx(2 * all_gather_s(link, 8, 1e6))
    assert all_reduce_s(link, 2, 1e9) == pytest.approx(1.0, rel=1e-4)


def test_layer_time_adds_its_parts_up():
    counts, owner, _ = random_case(1)
    group = Grouping(4, 2)
    plain = layer_time(PROFILE, SHAPE, group, work_of(counts, owner))
    shadowed = layer_time(PROFILE, SHAPE, group, work_of(counts, owner, tuple(range(7))), 7)
    assert shadowed.shadow_s == pytest.approx(7 * shadow_s(PROFILE, SHAPE, group))
    assert shadowed.compute_s < plain.compute_s
    assert shadowed.exchange_s < plain.exchange_s
    everything = layer_time(PROFILE, SHAPE, group, work_of(counts, owner, tuple(range(8))), 8)
    latency = PROFILE.between.latency_s * 1.1
    assert everything.exchange_s == pytest.approx(EXCHANGES * latency), "nothing but empty messages is left"
    assert everything.shadow_s < 8 * shadow_s(PROFILE, SHAPE, group), "all of them are gathered at once"
    assert plain.total_s == pytest.approx(plain.compute_s + plain.exchange_s)
