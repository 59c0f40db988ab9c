"""All-to-all of rows between CPU ranks of one machine, through memory that they share.

Over gloo a row goes through the kernel's TCP stack to reach the process next door: two copies and a system call for
each buffer of it.  Here a rank writes the rows of the others into memory of its own, all wait for one another, and each
reads its rows from there straight to where its experts want them, so that reordering them costs nothing more.

The memory has no name in a file system: the others open it through /proc while its owner lives, so that nothing is left
behind however a rank ends.  Two buffers take turns: what is written in call n + 2 was read before anyone left the
barrier of call n + 1.  Ranks that do not see one another's processes (other hosts, containers, network namespaces)
find that out at the start and use gloo.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeflow.parallel import collectives
from moeflow.parallel.topology import Group
from moeflow.parallel.watch import watched

#: Rows [first, last + 1) of a tensor.
Block = tuple[int, int]

_WORD = 8
_PAGE = mmap.PAGESIZE
# Words of a header: a token; for each buffer its generation and file descriptor; for each buffer where the rows of each
# receiver begin.
_GENERATION, _DESCRIPTOR, _OFFSETS = 1, 3, 5


class SharedRows:
    """Exchange of rows among the ranks of a group; every rank makes the same calls in the same order.

    Made by `SharedRows.of`.
    """

    def __init__(self, group: Group, header: _Memory, others: dict[int, _Header]):
        self._group, self._header, self._others = group, header, others
        self._own = _Header(header.tensor, group.size)
        self._buffers: list[_Memory | None] = [None, None]
        self._turn = 0

    @classmethod
    def of(cls, group: Group) -> SharedRows | None:
        """That of a group, which all layers use in turn; collective at the first call.

        Returns:
            None, on every rank, where one of them cannot share memory with all others.
        """
        if group.process_group is None:
            return None
        if group.process_group not in _opened:
            _opened[group.process_group] = cls._open(group)
        return _opened[group.process_group]

    @classmethod
    def _open(cls, group: Group) -> SharedRows | None:
        if not hasattr(os, "memfd_create"):
            return None  # not Linux
        header = _Memory(_PAGE * -(-_WORD * (_OFFSETS + 2 * group.size) // _PAGE))
        # Never 0, which fresh memory holds.
        token = secrets.randbits(60) + 1
        header.tensor.view(torch.int64)[0] = token
        # Namespaces of network and of processes: hosts that are played by namespaces of one machine are hosts.
        space = tuple(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))
        told = collectives.gather_objects((space, os.getpid(), header.descriptor, header.nbytes, token), group)
        others = {}
        for rank, (their_space, pid, descriptor, nbytes, their_token) in enumerate(told):
            if rank != group.rank and their_space == space:
                memory = _mapped(pid, descriptor, nbytes)
                if memory is not None and memory.view(torch.int64)[0].item() == their_token:
                    others[rank] = _Header(memory, group.size, pid)
        all_found = collectives.gather_objects(len(others) == group.size - 1, group)
        return cls(group, header, others) if all(all_found) else None

    def exchange(
        self, rows_RD: Tensor, outgoing: Sequence[Sequence[Block]], out_RD: Tensor, incoming: Sequence[Sequence[Block]]
    ) -> Tensor:
        """Send rows to all ranks of the group and receive theirs.

        Args:
            rows_RD: contiguous, on the CPU.
            outgoing: for each rank, the blocks of `rows_RD` that it gets, in order.
            out_RD: contiguous, of the same width and dtype; filled, and returned.
            incoming: for each rank, the blocks of `out_RD` that its rows fill, in order.  Together they are as long as
                what that rank sends, but may be cut elsewhere.
        """
        turn, own = self._turn, self._group.rank
        self._turn = 1 - turn
        width = _bytes_of_row(rows_RD)
        sizes = [0 if rank == own else sum(hi - lo for lo, hi in to) * width for rank, to in enumerate(outgoing)]
        buffer = self._buffer(turn, sum(sizes))
        start = 0
        for rank, blocks in enumerate(outgoing):
            self._own.set_offset(turn, rank, start)
            if rank != own:
                for lo, hi in blocks:
                    stop = start + (hi - lo) * width
                    _copy(_as_rows(buffer[start:stop], rows_RD), rows_RD[lo:hi])
                    start = stop
        _copy_blocks(out_RD, incoming[own], rows_RD, outgoing[own])
        collectives.barrier(self._group, "all-to-all of rows")
        with watched("all-to-all of rows", self._group, out_RD.shape):
            for rank, header in self._others.items():
                _fill(out_RD, incoming[rank], header, turn, own)
        return out_RD

    def _buffer(self, turn: int, nbytes: int) -> Tensor:
        """This rank's buffer of a turn, made larger if need be.  Nobody reads the old one any more."""
        memory = self._buffers[turn]
        if memory is None or memory.nbytes < nbytes:
            # Freed first: the two need not be there at once.
            self._buffers[turn] = memory = None
            # A quarter more, since loads differ from step to step.
            self._buffers[turn] = memory = _Memory(max(1, -(-nbytes * 5 // (4 * _PAGE))) * _PAGE)
            self._own.announce(turn, memory)
        return memory.tensor


# By process group, and gone with it.
_opened: weakref.WeakKeyDictionary[Any, SharedRows | None] = weakref.WeakKeyDictionary()


class _Memory:
    """Anonymous memory with a file descriptor by which other processes find it."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("moeflow-rows", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, nbytes)
        self.tensor = torch.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self.descriptor)


class _Header:
    """What a rank tells of its buffers: which memory they are, and where each receiver's rows begin."""

    def __init__(self, memory: Tensor, size: int, pid: int = 0):
        self._words = memory.view(torch.int64)
        self._size, self._pid = size, pid
        self._known: list[tuple[int, Tensor] | None] = [None, None]

    def announce(self, turn: int, memory: _Memory) -> None:
        self._words[_DESCRIPTOR + turn] = memory.descriptor
        self._words[_GENERATION + turn] += 1

    def set_offset(self, turn: int, receiver: int, offset: int) -> None:
        self._words[_OFFSETS + turn * self._size + receiver] = offset

    def offset(self, turn: int, receiver: int) -> int:
        return int(self._words[_OFFSETS + turn * self._size + receiver])

    def buffer(self, turn: int) -> Tensor:
        """The other rank's buffer, mapped here."""
        generation, known = int(self._words[_GENERATION + turn]), self._known[turn]
        if known is None or known[0] != generation:
            memory = _mapped(self._pid, int(self._words[_DESCRIPTOR + turn]))
            if memory is None:
                raise RuntimeError(f"process {self._pid}, which shares memory with this one, has gone")
            self._known[turn] = known = (generation, memory)
        return known[1]


def _mapped(pid: int, descriptor: int, nbytes: int = 0) -> Tensor | None:
    """Memory of another process; None if it cannot be reached.  0 bytes takes all of it."""
    try:
        with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b", buffering=0) as file:
            if nbytes and os.fstat(file.fileno()).st_size != nbytes:
                return None
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
    except (OSError, ValueError):
        return None


def _bytes_of_row(rows_RD: Tensor) -> int:
    return rows_RD.element_size() * math.prod(rows_RD.shape[1:])


def _fill(out_RD: Tensor, blocks: Sequence[Block], sender: _Header, turn: int, own: int) -> None:
    """Read what a rank wrote for this one."""
    blocks = [(lo, hi) for lo, hi in blocks if lo < hi]
    if not blocks:
        return
    theirs, start = sender.buffer(turn), sender.offset(turn, own)
    for lo, hi in blocks:
        stop = start + (hi - lo) * _bytes_of_row(out_RD)
        _copy(out_RD[lo:hi], _as_rows(theirs[start:stop], out_RD))
        start = stop


def _as_rows(memory: Tensor, like_RD: Tensor) -> Tensor:
    return memory.view(like_RD.dtype).view(-1, *like_RD.shape[1:])


def _copy(out_RD: Tensor, rows_RD: Tensor) -> None:
    if rows_RD.shape[0]:
        out_RD.copy_(rows_RD)


def _copy_blocks(out_RD: Tensor, into: Sequence[Block], rows_RD: Tensor, of: Sequence[Block]) -> None:
    """Copy the rows of some blocks, in order, into blocks that may be cut elsewhere."""
    into, of = [b for b in into if b[0] < b[1]], [b for b in of if b[0] < b[1]]
    while into and of:
        (out_lo, out_hi), (lo, hi) = into[0], of[0]
        count = min(out_hi - out_lo, hi - lo)
        _copy(out_RD[out_lo : out_lo + count], rows_RD[lo : lo + count])
        into[0], of[0] = (out_lo + count, out_hi), (lo + count, hi)
        into = into if into[0][0] < into[0][1] else into[1:]
        of = of if of[0][0] < of[0][1] else of[1:]
    assert not into and not of, "a rank gets as many of its own rows as it sends"
