"""Balancing policies as others published them, for comparison: written from their descriptions, faults included.

Legend: W workers (ranks), E experts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def fastmoe_shadows(
    counts: NDArray, d_model: int, alpha: float, bandwidth: float, flops: float, num_bytes: int = 4
) -> tuple[int, ...]:
    """FasterMoE's policy as FastMoE ships it: counts [W, E] are summed over experts where workers were meant.

    What it sorts is therefore how much each worker sends.  With equal batches all are equal, nothing gains, and
    nothing is shadowed.
    """
    sent = counts.sum(1)
    order = np.argsort(-sent, kind="stable")
    feature = d_model * num_bytes / bandwidth
    model = 2 * alpha * d_model**2 * num_bytes / bandwidth
    compute = 4 * alpha * d_model**2 / flops
    best = (3 * compute + 4 * feature) * sent[order[0]]
    chosen: list[int] = []
    for k in range(1, len(order)):
        time = (3 * compute + 4 * feature) * sent[order[k]] + k * model
        if time >= best:
            break
        best = time
        chosen.append(int(order[k - 1]))
    return tuple(chosen)


def smartmoe_shadows(
    counts: NDArray, owner: NDArray, d_model: int, alpha: float, bandwidth: float, flops: float, num_bytes: int = 2
) -> tuple[int, ...]:
    """The repaired policy in SmartMoE's artifact: loads by expert, local rows left out, the best prefix.

    One expert stands for its worker; the price of a shadow carries a factor of 8.
    """
    total = counts.sum(0)
    order = np.argsort(-total, kind="stable")
    feature = d_model * num_bytes / bandwidth
    model = 8 * 2 * alpha * d_model**2 * num_bytes / bandwidth
    compute = 4 * alpha * d_model**2 / flops
    best, chosen = np.inf, 0
    for k, expert in enumerate(order):
        home = owner[expert]
        computed = total[expert] + counts[home, order[:k]].sum()
        carried = total[expert] - counts[home, expert]
        time = 3 * compute * computed + 4 * feature * carried + k * model
        if time < best:
            best, chosen = time, k
    return tuple(sorted(int(e) for e in order[:chosen]))


def smartmoe_placement(load: NDArray, old: NDArray, workers: int) -> NDArray[np.int64]:
    """SmartMoE's greedy: experts by load, each to the least loaded worker with a free place, the old one on a tie.

    Taken only where the busiest worker has less than before.
    """
    busy, free = np.zeros(workers), np.full(workers, len(load) // workers)
    new = np.zeros(len(load), dtype=np.int64)
    for expert in np.argsort(-load, kind="stable"):
        open_ = np.where(free > 0, busy, np.inf)
        rank = int(old[expert]) if open_[old[expert]] == open_.min() else int(open_.argmin())
        new[expert] = rank
        busy[rank] += load[expert]
        free[rank] -= 1
    before = np.bincount(old, load, minlength=workers).max()
    return new if busy.max() < before else old


def eplb(load: NDArray, workers: int, slots: int) -> list[list[int]]:
    """DeepSeek's expert-parallel load balancer (one group): replicas to the hottest expert by load a replica, then the
    replicas by load to the least loaded worker with a free slot.  Rows of an expert are split evenly.

    Returns:
        Experts in the slots of each worker; one may stand twice on the same.
    """
    replicas = np.ones(len(load), dtype=np.int64)
    for _ in range(workers * slots - len(load)):
        replicas[np.argmax(load / replicas)] += 1
    pieces = [(load[e] / replicas[e], e) for e in range(len(load)) for _ in range(replicas[e])]
    busy, held = np.zeros(workers), [[] for _ in range(workers)]
    for piece, expert in sorted(pieces, key=lambda item: (-item[0], item[1])):
        rank = min((r for r in range(workers) if len(held[r]) < slots), key=lambda r: (busy[r], r))
        busy[rank] += piece
        held[rank].append(expert)
    return held


def even_room(held: list[list[int]], load: NDArray) -> NDArray[np.int64]:
    """[E, W] whole rows of each expert on each worker when its replicas share them evenly."""
    room = np.zeros((len(load), len(held)), dtype=np.int64)
    for rank, experts in enumerate(held):
        for expert in experts:
            room[expert, rank] += 1
    places = room.sum(1, keepdims=True)
    room_rows = room * load[:, None] // places
    first = (room > 0).argmax(1)
    room_rows[np.arange(len(load)), first] += load - room_rows.sum(1)
    return room_rows
