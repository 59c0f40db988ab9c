"""One expert a core: independent pieces of CPU work on threads that each compute on one core.

A matrix product of few rows that two cores share spends its time on sharing.  Two products, one on each core, do not.
The pieces write to memory of their own, so the result does not depend on which thread runs which.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

#: Pieces are shared out only if no thread gets more than this times the mean.
UNEVEN = 1.1

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def shares(costs: Sequence[int], count: int) -> list[list[int]] | None:
    """Pieces of each of `count` threads, the largest first to whoever has least; None where they come out uneven.

    Args:
        costs: of each piece, in any unit.
        count: threads.
    """
    if count < 2 or len(costs) < 2 * count:
        return None
    loads, chosen = [0] * count, [[] for _ in range(count)]  # type: list[int], list[list[int]]
    for piece in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = loads.index(min(loads))
        loads[least] += costs[piece]
        chosen[least].append(piece)
    return chosen if max(loads) * count <= UNEVEN * sum(loads) else None


def run(work: Callable[[int, int], None], pieces: Sequence[Sequence[int]]) -> None:
    """Call work(piece, thread) for all pieces of each thread, at once on all threads; raises what a piece raised."""
    pool = _pool(len(pieces))
    for done in [pool.submit(_run, work, own, thread) for thread, own in enumerate(pieces)]:
        done.result()


def _run(work: Callable[[int, int], None], pieces: Sequence[int], thread: int) -> None:
    # What autograd is to know of this is the business of the operator that called.
    with torch.no_grad():
        for piece in pieces:
            work(piece, thread)


def _pool(count: int) -> ThreadPoolExecutor:
    with _lock:
        if count not in _pools:
            _pools[count] = _start(count)
        return _pools[count]


def _start(count: int) -> ThreadPoolExecutor:
    threads = torch.get_num_threads()
    all_there = threading.Barrier(count)
    pool = ThreadPoolExecutor(count, "moeflow-ops", _compute_on_one_core)
    for done in [pool.submit(all_there.wait) for _ in range(count)]:
        done.result()
    torch.set_num_threads(threads)  # the number for new threads, which a worker's setting changed too
    return pool


def _compute_on_one_core() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # takes the setting over for good; a later change elsewhere would do so otherwise


def _after_fork() -> None:
    global _lock
    _pools.clear()  # threads do not come along
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
