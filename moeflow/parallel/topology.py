"""Process groups of a layout.

Each distinct set of ranks gets one group, created by its members alone, so that starting up costs every rank the same
few calls whatever the number of ranks.  An axis of size one has no group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from moeflow.schema.layout import AXES, Layout
from moeflow.schema.parallel import ParallelConfig


@dataclass(frozen=True)
class Group:
    """Ranks that differ on one axis (or the ranks of a whole stage).

    Attributes:
        name: axis, or "stage" or "world".
        ranks: global ranks, ascending; a rank's place in it is its group rank.
        rank: group rank of this process.
        process_group: None when the group has one rank.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


def group_of(process_group: dist.ProcessGroup | None, name: str) -> Group:
    """The group of a process group that somebody else made; None is the world, or this process alone.

    Args:
        process_group: that this rank is a member of.
        name: for messages.
    """
    if not dist.is_initialized():
        return Group(name, (0,), 0)
    ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    own = dist.get_rank()
    assert own in ranks, f"rank {own} is no member of the {name} group {ranks}"
    return Group(name, ranks, ranks.index(own), (process_group or dist.group.WORLD) if len(ranks) > 1 else None)


@dataclass(frozen=True)
class Topology:
    """A layout seen from one rank, with its process groups.

    `groups` holds a `Group` for every axis of pp, dp, tp, edp, ep, etp, and for "stage" (all ranks of this pipeline
    stage), "ends" (the first and the last stage's ranks of this pp group) and "world".  `shared_memory` is whether CPU
    ranks of one machine may exchange rows through memory that they share.
    """

    layout: Layout
    rank: int
    groups: dict[str, Group] = field(default_factory=dict)
    shared_memory: bool = True

    @classmethod
    def alone(cls) -> Topology:
        """The topology of one process without torch.distributed."""
        layout = Layout(1)
        return cls(layout, 0, {name: Group(name, (0,), 0) for name in (*AXES, "stage", "ends", "world")})

    @classmethod
    def imagined(cls, layout: Layout, rank: int) -> Topology:
        """The topology of a rank of a layout that is not running: groups without process groups, to count with."""
        ranks_of = {axis: tuple(layout.group(rank, axis)) for axis in ("pp", "tp", "ep", "etp")}
        return cls(layout, rank, {axis: Group(axis, r, r.index(rank)) for axis, r in ranks_of.items()})

    @classmethod
    def create(cls, config: ParallelConfig, timeout_s: float) -> Topology:
        """Create the groups of this process.  Every rank of the world must call it.

        Args:
            config: degrees; checked against the number of processes.
            timeout_s: seconds that a collective may take.

        Raises:
            ConfigError: the degrees do not divide the number of processes.
        """
        if not dist.is_initialized():
            Layout(1, config.pp, config.tp, config.ep, config.etp)
            return cls.alone()
        layout = Layout(dist.get_world_size(), config.pp, config.tp, config.ep, config.etp)
        rank = dist.get_rank()
        ranks_of = {axis: tuple(layout.group(rank, axis)) for axis in AXES}
        ranks_of["stage"] = tuple(layout.stage_group(rank))
        pipeline = ranks_of["pp"]
        ranks_of["ends"] = (
            (pipeline[0], pipeline[-1]) if rank in (pipeline[0], pipeline[-1]) and layout.pp > 1 else (rank,)
        )
        ranks_of["world"] = tuple(range(layout.world))
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {ranks_of["world"]: dist.group.WORLD}
        groups = {}
        for name, ranks in ranks_of.items():
            if ranks not in made:
                made[ranks] = _new_group(name, ranks, timeout_s)
            process_group = made[ranks] if len(ranks) > 1 else None
            groups[name] = Group(name, ranks, ranks.index(rank), process_group)
        return cls(layout, rank, groups, config.shared_memory)

    def __getitem__(self, name: str) -> Group:
        return self.groups[name]

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which speaks and writes."""
        return self.rank == 0


def subgroup(group: Group, name: str, places: Sequence[int], timeout_s: float) -> Group:
    """A part of a group; all ranks of that part call it.

    Args:
        group: the whole.
        name: of the part, for messages.
        places: group ranks of the part, ascending; this rank's is one of them.
        timeout_s: seconds that a collective may take.
    """
    ranks = tuple(group.ranks[place] for place in places)
    return Group(name, ranks, ranks.index(group.ranks[group.rank]), _new_group(name, ranks, timeout_s))


def _new_group(name: str, ranks: tuple[int, ...], timeout_s: float) -> dist.ProcessGroup | None:
    if len(ranks) == 1:
        return None
    return dist.new_group(
        list(ranks),
        timeout=timedelta(seconds=timeout_s),
        use_local_synchronization=True,
        group_desc=f"moeflow_{name}",
    )
