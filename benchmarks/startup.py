"""What starting costs as the number of ranks grows: rendezvous, groups, and a first collective in each of them.

    python benchmarks/startup.py                        2, 4, 8 and 16 processes of this machine
    python benchmarks/startup.py --count 1024 100000    groups only counted, without starting anything

Each rank creates the groups that it is a member of, and no other, so the number of `new_group` calls of a rank does not
depend on the number of ranks.  Processes of one machine share its cores: what they all compute at once, such as
importing torch, grows with their number here and not on a cluster, so the time is taken from where all have imported,
and the CPU time of a rank is about what it would take with a core of its own.
"""

from __future__ import annotations

import argparse
import datetime
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moeflow.parallel import collectives
from moeflow.parallel.topology import Topology
from moeflow.schema import ParallelConfig
from moeflow.schema.layout import AXES, Layout

# The most different groups that a layout of this size can have: every axis larger than one where there is room.
LAYOUTS: dict[int, dict[str, int]] = {
    2: {"ep": 2},
    4: {"tp": 2, "ep": 2},
    8: {"pp": 2, "tp": 2, "ep": 2},
    16: {"pp": 2, "tp": 2, "ep": 2, "etp": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--count", type=int, nargs="+", default=[16, 1024, 16384], help="ranks to count groups for")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, gloo, torch {torch.__version__}\n")
    print(
        "| processes | layout | groups of a rank | rendezvous s | groups s | first collectives s | CPU ms of a rank |"
    )
    print("|---|---|---|---|---|---|---|")
    for world in options.processes:
        runs = [_run(world) for _ in range(options.repeats)]
        rendezvous, groups, first = (min(run[i] for run in runs) for i in range(3))
        words = " ".join(f"{key}={value}" for key, value in LAYOUTS[world].items())
        cpu = 1000 * min(run[4] for run in runs)
        print(f"| {world} | {words} | {runs[0][3]} | {rendezvous:.2f} | {groups:.2f} | {first:.2f} | {cpu:.0f} |")
    print("\n| ranks | layout | new_group calls of a rank | of all ranks | different groups |\n|---|---|---|---|---|")
    for world in options.count:
        layout = Layout(world, pp=2, tp=2, ep=2, etp=2)
        calls, of_all, different = count(layout)
        print(f"| {world:,} | pp=2 tp=2 ep=2 etp=2 | {calls} | {of_all:,} | {different:,} |")


def count(layout: Layout) -> tuple[int, int, int]:
    """(most `new_group` calls of any rank looked at, calls of all ranks, different groups of the whole layout).

    The first and the last ranks are looked at; beside these groups, a run makes two over all ranks, for control.
    """
    shown = sorted({*range(min(layout.world, 64)), *range(max(0, layout.world - 64), layout.world)})
    calls = max(len(_own_groups(layout, rank)) for rank in shown)
    groups = {tuple(group) for axis in AXES for group in layout.groups(axis) if len(group) > 1}
    if layout.pp > 1:
        groups |= {tuple(layout.stage_group(rank)) for rank in range(0, layout.world, layout.stage)}
        groups |= {(group[0], group[-1]) for group in layout.groups("pp")}
    groups -= {tuple(range(layout.world))}
    missing = {group for rank in shown for group in _own_groups(layout, rank)} - groups
    assert not missing, f"groups that are not counted: {missing}"
    return calls, sum(map(len, groups)), len(groups)


def _own_groups(layout: Layout, rank: int) -> set[tuple[int, ...]]:
    """Groups that `Topology.create` makes on this rank; counted by calling it with a `new_group` that only notes."""
    made: set[tuple[int, ...]] = set()
    config = ParallelConfig(pp=layout.pp, tp=layout.tp, ep=layout.ep, etp=layout.etp)
    kept = dist.is_initialized, dist.get_world_size, dist.get_rank, dist.new_group

    def note(ranks: list[int], **_: Any) -> None:
        made.add(tuple(ranks))

    dist.is_initialized, dist.get_world_size, dist.get_rank = lambda: True, lambda: layout.world, lambda: rank
    dist.new_group = note
    try:
        Topology.create(config, 1.0)
    finally:
        dist.is_initialized, dist.get_world_size, dist.get_rank, dist.new_group = kept
    return made


def _run(world: int) -> list[float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with mp.get_context("spawn").Manager() as manager:
        answers = manager.dict()
        barrier = manager.Barrier(world)
        mp.spawn(_rank, (world, port, barrier, answers), nprocs=world)
        found = list(answers.values())
    return [max(column) for column in zip(*found, strict=True)]


def _rank(rank: int, world: int, port: int, barrier: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    barrier.wait()
    started, cpu = time.perf_counter(), time.process_time()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    met = time.perf_counter()
    topology = Topology.create(ParallelConfig(**LAYOUTS[world]), 120.0)
    grouped = time.perf_counter()
    groups = {group.ranks: group for group in topology.groups.values() if group.size > 1}
    for group in groups.values():
        collectives.all_reduce(torch.ones(1), group)
    done, cpu = time.perf_counter(), time.process_time() - cpu
    own = len(groups) - (tuple(range(world)) in groups)
    answers[rank] = (met - started, grouped - met, done - grouped, own, cpu)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
