"""All-to-all of rows between CPU ranks of one machine, through memory that they share.

Over gloo a row goes through the kernel's TCP stack to reach the process next door: two copies and a system call for
each buffer of it.  Here rows stay where they are, in memory that the others can open; all wait for one another, and
each reads its rows from there straight to where its experts want them, so that reordering them costs nothing more.

The memory has no name in a file system: the others open it through /proc while its owner lives, so that nothing is left
behind however a rank ends.  Rows are held until everyone has come to the next exchange, and has thus read them.  Ranks
that do not see one another's processes (other hosts, containers, network namespaces) find that out at the start and use
gloo.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeflow.ops import pool
from moeflow.parallel import collectives
from moeflow.parallel.topology import Group
from moeflow.parallel.watch import watched

#: Rows [first, last + 1) of a tensor.
Block = tuple[int, int]

#: Blocks that a rank can tell of: ranks times the experts of each.
MOST_BLOCKS = 4096
#: Memory of another rank that stays mapped here, in blocks.
_MAPPED = 2 * pool.MOST_SHARED
# Words of a rank's notice board, twice over, since what is read in one exchange must not change in the next: block of
# memory, its descriptor, bytes of a row, then the first byte of each block of rows.
_SERIAL, _DESCRIPTOR, _FIRST = 0, 1, 2
_WORDS = _FIRST + MOST_BLOCKS


class SharedRows:
    """Exchange of rows among the ranks of a group; every rank makes the same calls in the same order.

    Made by `SharedRows.of`.
    """

    def __init__(self, rank: int, board: Tensor, others: dict[int, _Neighbor]):
        self._rank, self._board, self._others = rank, board, others
        self._turn = 0
        self._held: Tensor | None = None

    @classmethod
    def of(cls, group: Group, num_local: int) -> SharedRows | None:
        """That of a group, which all layers use in turn; collective at the first call.

        Args:
            group: of the ranks.
            num_local: blocks of rows for each rank: experts on each.

        Returns:
            None, on every rank, where one of them cannot share memory with all others.
        """
        if group.process_group is None or group.size * num_local > MOST_BLOCKS:
            return None
        if group.process_group not in _opened:
            _opened[group.process_group] = cls._open(group)
        return _opened[group.process_group]

    @classmethod
    def _open(cls, group: Group) -> SharedRows | None:
        if not hasattr(os, "memfd_create"):
            return None  # not Linux
        pool.share_rows()
        board = pool.shareable(torch.zeros(2 * _WORDS, dtype=torch.int64))
        found = pool.found(board)
        assert found is not None, "shareable memory can be found"
        # Namespaces of network and of processes: hosts that are played by namespaces of one machine are hosts.
        space = tuple(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))
        # Never 0, which fresh memory holds.
        board[0] = token = secrets.randbits(60) + 1
        told = collectives.gather_objects((space, os.getpid(), found[1], token), group)
        others = {}
        for rank, (their_space, pid, descriptor, their_token) in enumerate(told):
            if rank != group.rank and their_space == space:
                memory = _mapped(pid, descriptor)
                if memory is not None and int(memory[:8].view(torch.int64)) == their_token:
                    others[rank] = _Neighbor(pid, memory.view(torch.int64))
        all_found = collectives.gather_objects(len(others) == group.size - 1, group)
        return cls(group.rank, board, others) if all(all_found) else None

    def exchange(
        self,
        group: Group,
        rows_RD: Tensor,
        outgoing: Sequence[Sequence[Block]],
        out_RD: Tensor,
        incoming: Sequence[Sequence[Block]],
    ) -> Tensor:
        """Send rows to all ranks of the group and receive theirs.

        Args:
            group: the one that this was made for.
            rows_RD: contiguous, on the CPU; must not be changed before the next exchange.  Rows of `pool.empty_rows`
                are read by the others where they are, those of other memory from a copy.
            outgoing: for each rank, the blocks of `rows_RD` that it gets.
            out_RD: contiguous, of the same width and dtype; filled, and returned.
            incoming: for each rank, the blocks of `out_RD` that its rows fill: as many as it sends, as long.
        """
        own = self._rank
        rows_RD = self._tell(rows_RD, outgoing)
        for (out_lo, out_hi), (lo, hi) in zip(incoming[own], outgoing[own], strict=True):
            if lo < hi:
                out_RD[out_lo:out_hi].copy_(rows_RD[lo:hi])
        collectives.barrier(group, "all-to-all of rows")
        # Everyone is here, so nobody reads what was sent before any more.
        self._held = rows_RD
        with watched("all-to-all of rows", group, tuple(out_RD.shape)):
            for rank, neighbor in self._others.items():
                neighbor.read(out_RD, incoming[rank], self._turn, own * len(incoming[rank]))
        self._turn = 1 - self._turn
        return out_RD

    def _tell(self, rows_RD: Tensor, outgoing: Sequence[Sequence[Block]]) -> Tensor:
        """Write on the notice board where the others find their rows."""
        rows_RD = pool.shareable(rows_RD)
        found = pool.found(rows_RD)
        assert found is not None, "shareable rows can be found"
        serial, descriptor, start = found
        width = rows_RD.element_size() * math.prod(rows_RD.shape[1:])
        words = [serial, descriptor, *(start + lo * width for blocks in outgoing for lo, _ in blocks)]
        first = self._turn * _WORDS
        self._board[first : first + len(words)] = torch.tensor(words)
        return rows_RD


# By process group, and gone with it: so nothing in the value may hold on to the group.
_opened: weakref.WeakKeyDictionary[Any, SharedRows | None] = weakref.WeakKeyDictionary()


class _Neighbor:
    """Another rank: its notice board, and what of its memory is mapped here."""

    def __init__(self, pid: int, board: Tensor):
        self._pid, self._board = pid, board
        self._mapped: OrderedDict[int, Tensor] = OrderedDict()

    def read(self, out_RD: Tensor, blocks: Sequence[Block], turn: int, first: int) -> None:
        """Fill blocks of `out_RD` by what the board says is this rank's, from its block number `first` on."""
        if all(lo == hi for lo, hi in blocks):
            return
        words = self._board[turn * _WORDS : (turn + 1) * _WORDS]
        serial, descriptor = words[:_FIRST].tolist()
        memory = self._memory(serial, descriptor)
        starts = words[_FIRST + first : _FIRST + first + len(blocks)].tolist()
        width = out_RD.element_size() * math.prod(out_RD.shape[1:])
        for (lo, hi), start in zip(blocks, starts, strict=True):
            if lo < hi:
                rows = memory[start : start + (hi - lo) * width].view(out_RD.dtype)
                out_RD[lo:hi].copy_(rows.view(-1, *out_RD.shape[1:]))

    def _memory(self, serial: int, descriptor: int) -> Tensor:
        if serial not in self._mapped:
            memory = _mapped(self._pid, descriptor)
            if memory is None:
                raise RuntimeError(f"process {self._pid} of this machine has gone")
            self._mapped[serial] = memory
            if len(self._mapped) > _MAPPED:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(serial)
        return self._mapped[serial]


def _mapped(pid: int, descriptor: int) -> Tensor | None:
    """Memory of another process; None if it cannot be reached."""
    try:
        with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b", buffering=0) as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    except (OSError, ValueError):
        return None
