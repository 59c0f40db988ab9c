"""Memory that large CPU tensors of the experts are taken from, and return to.

glibc gives every block above 32 MB back to the system at once, so that each training step would have its weight
gradients and hidden layers mapped and zeroed page by page anew: with 64 experts of 2,048 x 512 that is 130,000 page
faults a step, and as much time as a third of the matrix products.  A block handed out here comes back when the last
tensor on it is freed, and serves the next request of about its size.

The memory is lent as a numpy view that the tensor's storage holds on to; the end of that view is the end of the loan.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

#: Smaller tensors go to torch's allocator: malloc keeps their memory by itself.
SMALLEST_BYTES = 4 * 2**20
#: The same for memory that is shared, which saves a copy.
SMALLEST_SHARED_BYTES = 2**16
#: Shared blocks at once, each of which costs two file descriptors; beyond, memory is an ordinary one.
MOST_SHARED = 64
#: A block may be larger than what is asked for by this factor.
SLACK = 1.25
#: Idle bytes beyond these go back to the system, the longest unused blocks first.
IDLE_BYTES = 2 * 2**30


class _Block:
    """A piece of memory.

    Attributes:
        memory: uint8, as numpy sees it.
        descriptor: by which other processes can open it, if it can be shared.
        serial: no two blocks of a process have the same.
    """

    _serials = itertools.count(1)

    def __init__(self, nbytes: int, shared: bool):
        self.serial = next(self._serials)
        self.descriptor: int | None = None
        if shared:
            self.descriptor = os.memfd_create("moeflow-rows", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, nbytes)
            self.memory = np.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=np.uint8)
        else:
            self.memory = torch.empty(nbytes, dtype=torch.uint8).numpy()

    def __del__(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)


class Pool:
    """Blocks of memory by size, each lent to one tensor at a time.

    Args:
        idle_bytes: idle memory beyond this goes back to the system.
        shared: whether blocks are made so that other processes can open them.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES, shared: bool = False):
        self.idle_bytes, self.shared = idle_bytes, shared
        self._idle: list[_Block] = []  # longest unused first
        self._lent: dict[int, _Block] = {}  # by address
        self._lock = threading.RLock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype, needed: bool = False) -> Tensor:
        """An uninitialized CPU tensor; like torch.empty in all but where its memory comes from.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
            needed: take it from the pool even where that does not pay.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if not needed and nbytes < (SMALLEST_SHARED_BYTES if self.shared else SMALLEST_BYTES):
            return torch.empty(tuple(shape), dtype=dtype)
        if self.shared and not needed and len(self._lent) >= MOST_SHARED:
            return torch.empty(tuple(shape), dtype=dtype)
        # A little larger, so that next step's request, of a few rows more, fits; pages not written to cost nothing.
        grain = 1 << max(nbytes.bit_length() - 4, 12)
        rounded = max(1, -(-nbytes // grain)) * grain
        block = self._take(nbytes, rounded)
        if block is None:
            block = _Block(rounded, self.shared)
        address = block.memory.ctypes.data
        with self._lock:
            self._lent[address] = block
        loan = block.memory[:nbytes].view()
        weakref.finalize(loan, self._give_back, address).atexit = False
        return torch.from_numpy(loan).view(dtype).view(tuple(shape))

    def found(self, tensor: Tensor) -> tuple[int, int, int] | None:
        """(block's serial number, its descriptor, first byte in it) of a tensor; None if nobody else can open it."""
        block = self._lent.get(tensor.untyped_storage().data_ptr())
        if block is None or block.descriptor is None:
            return None
        return block.serial, block.descriptor, int(tensor.storage_offset()) * tensor.element_size()

    def idle(self) -> int:
        """Bytes that wait for the next request."""
        return sum(block.memory.nbytes for block in self._idle)

    def clear(self) -> None:
        """Give all idle memory back to the system."""
        with self._lock:
            self._idle.clear()

    def _take(self, nbytes: int, rounded: int) -> _Block | None:
        most = max(nbytes * SLACK, rounded)
        with self._lock:
            fitting = [block for block in self._idle if nbytes <= block.memory.nbytes <= most]
            if not fitting:
                return None
            best = min(fitting, key=lambda block: block.memory.nbytes)
            self._idle = [block for block in self._idle if block is not best]
            return best

    def _give_back(self, address: int) -> None:
        with self._lock:
            self._idle.append(self._lent.pop(address))
            while self.idle() > self.idle_bytes or (self.shared and len(self._idle) > MOST_SHARED):
                self._idle.pop(0)


_pool = Pool()
# Made when ranks of this machine are found to share memory.
_travelling: Pool | None = None


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialized tensor of the dtype and device of `like`, from the pool where that is the CPU's memory."""
    return _empty(_pool, shape, like)


def empty_rows(shape: Sequence[int], like: Tensor) -> Tensor:
    """The same for rows that go to other ranks next: where those can read this memory, they need no copy of it."""
    return _empty(_travelling or _pool, shape, like)


def _empty(of: Pool, shape: Sequence[int], like: Tensor) -> Tensor:
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        return like.new_empty(tuple(shape))
    return of.empty(shape, like.dtype)


def share_rows() -> None:
    """From now on let `empty_rows` give memory that other processes can open."""
    global _travelling
    _travelling = _travelling or Pool(shared=True)


def shareable(tensor: Tensor) -> Tensor:
    """The tensor itself where other processes can open its memory, else a copy of which that is true."""
    assert _travelling is not None, "share_rows was called"
    if _travelling.found(tensor) is not None:
        return tensor
    return _travelling.empty(tensor.shape, tensor.dtype, needed=True).copy_(tensor)


def found(rows: Tensor) -> tuple[int, int, int] | None:
    """Where other processes find rows of `empty_rows`: see `Pool.found`."""
    return _travelling.found(rows) if _travelling is not None else None


def clear() -> None:
    """Give the pools' idle memory back to the system."""
    _pool.clear()
    if _travelling is not None:
        _travelling.clear()
