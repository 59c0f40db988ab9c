"""Exchange through shared memory: the same rows as gloo's, whatever their memory and size; nothing left behind."""

from __future__ import annotations

import gc
import os
import time
import weakref
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moeflow.errors import CollectiveError
from moeflow.ops import pool
from moeflow.parallel.dispatcher import RankDispatcher
from moeflow.parallel.shared_memory import SharedRows
from moeflow.parallel.topology import Topology, group_of
from moeflow.schema import ParallelConfig
from tests.distributed import run_ranks

LOCAL = 3


def both_ways(world: int, steps: int) -> int:
    """Round trips beside those over gloo, with loads that change from step to step; returns the mapped blocks."""
    topology = Topology.create(ParallelConfig(ep=world), 30.0)
    shared, plain = RankDispatcher(topology), RankDispatcher(replace(topology, shared_memory=False))
    generator = torch.Generator().manual_seed(topology.rank)
    for step in range(steps):
        dtype = (torch.float32, torch.float64, torch.bfloat16)[step % 3]
        most = (0, 3, 400, 50)[step % 4]
        width = (1, 7, 64)[step % 3]
        counts = torch.randint(0, most + 1, (world * LOCAL,), generator=generator)
        rows = torch.randn(int(counts.sum()), width, generator=generator).to(dtype)
        rows = pool.empty_rows(rows.shape, rows).copy_(rows) if step % 2 else rows
        found = []
        for dispatcher in (shared, plain):
            leaf = rows.clone().requires_grad_() if step % 2 else rows.detach().requires_grad_()
            # Agreement on the width is asked for once; here it changes on purpose, on all ranks alike.
            dispatcher._agreed = dispatcher._agreed and step > 0
            here, per_expert, way = dispatcher.dispatch(leaf, counts)
            back = dispatcher.combine(here * 2, way)
            (grad,) = torch.autograd.grad(back, leaf, torch.ones_like(back))
            found.append((here.detach(), per_expert, back.detach(), grad))
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(found[0][2], rows * 2)
    assert shared._shared is not None and plain._shared is None
    return max(len(neighbor._mapped) for neighbor in shared._shared._others.values())


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_same_as_gloo(world: int):
    mapped = run_ranks(both_ways, world, world, 24, timeout=90)
    assert all(count <= 2 * pool.MOST_SHARED for count in mapped)


def many_blocks() -> int:
    """More live rows than blocks that are shared: the rest travels from a copy, and descriptors do not run out."""
    group = group_of(None, "world")
    shared = SharedRows.of(group, 1)
    assert shared is not None
    kept = []
    for number in range(3 * pool.MOST_SHARED):
        kept.append(pool.empty_rows((2, 2**15), torch.empty(0)).fill_(number))
        rows, out = kept[-1], torch.empty(2, 2**15)
        blocks = [[(0, 1)], [(1, 2)]]
        assert (shared.exchange(group, rows, blocks, out, blocks) == number).all()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.distributed
def test_descriptors_are_bounded():
    # Two for each own block, one for each of the other's that is mapped.
    assert max(run_ranks(many_blocks, 2, timeout=90)) < 5 * pool.MOST_SHARED


def far_apart() -> bool:
    """Each rank in a network namespace of its own, as on hosts of their own."""
    dispatcher_group = group_of(None, "world")
    real = os.readlink
    os.readlink = lambda path: f"{real(path)} {dispatcher_group.rank}"  # type: ignore[assignment]
    try:
        return SharedRows.of(dispatcher_group, 1) is None
    finally:
        os.readlink = real


def unreachable() -> bool:
    """One rank cannot open the others' memory, as in a container without their processes."""
    group = group_of(None, "world")
    if group.rank == 1:
        os.getpid = lambda: 2**22 + 1  # type: ignore[assignment]
    return SharedRows.of(group, 1) is None


@pytest.mark.distributed
@pytest.mark.parametrize("surroundings", [far_apart, unreachable])
def test_ranks_that_do_not_see_one_another_use_gloo_all_of_them(surroundings):
    assert all(run_ranks(surroundings, 2, timeout=60))


def one_rank_stays_away() -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=3.0))
    group = group_of(None, "world")
    shared = SharedRows.of(group, 1)
    assert shared is not None
    blocks = [[(0, 1)], [(1, 2)]]
    rows, out = torch.ones(2, 8), torch.empty(2, 8)
    shared.exchange(group, rows, blocks, out, blocks)
    if group.rank == 1:
        time.sleep(8)
        return ""
    with pytest.raises(CollectiveError) as caught:
        shared.exchange(group, rows, blocks, out, blocks)
    return str(caught.value)


@pytest.mark.distributed
def test_a_rank_that_does_not_come_is_named():
    message = run_ranks(one_rank_stays_away, 2, timeout=40, init=False)[0]
    assert "all-to-all of rows over the world group (ranks 0, 1) did not finish" in message
    assert "did not arrive: 1" in message


def gone_with_its_group() -> bool:
    """A process group that somebody keeps alive to the end of the process would abort there."""
    made = dist.new_group([0, 1])
    seen = weakref.ref(made)
    shared = SharedRows.of(group_of(made, "pair"), 1)
    assert shared is not None
    dist.destroy_process_group(made)
    del made, shared
    gc.collect()
    return seen() is None


@pytest.mark.distributed
def test_nothing_holds_on_to_a_process_group():
    assert run_ranks(gone_with_its_group, 2, timeout=40) == [True, True]
