"""Memory that large CPU tensors of the experts are taken from, and return to.

glibc gives every block above 32 MB back to the system at once, so that each training step would have its weight
gradients and hidden layers mapped and zeroed page by page anew: with 64 experts of 2,048 x 512 that is 130,000 page
faults a step, and as much time as a third of the matrix products.  A block handed out here comes back when the last
tensor on it is freed, and serves the next request of about its size.

The memory is lent as a numpy view that the tensor's storage holds on to; the end of that view is the end of the loan.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

#: Smaller tensors go to torch's allocator: malloc keeps their memory by itself.
SMALLEST_BYTES = 4 * 2**20
#: A block may be larger than what is asked for by this factor.
SLACK = 1.25
#: Idle bytes beyond these go back to the system, the longest unused blocks first.
IDLE_BYTES = 2 * 2**30


class Pool:
    """Blocks of memory by size, each lent to one tensor at a time."""

    def __init__(self, idle_bytes: int = IDLE_BYTES):
        self.idle_bytes = idle_bytes
        self._idle: list[Tensor] = []  # longest unused first
        self._lock = threading.RLock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized CPU tensor; like torch.empty in all but where its memory comes from."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self._take(nbytes)
        if block is None:
            # A little larger, so that next step's request, of a few rows more, fits; pages not written to cost nothing.
            grain = 1 << (nbytes.bit_length() - 4)
            block = torch.empty(-(-nbytes // grain) * grain, dtype=torch.uint8)
        loan = block.numpy()[:nbytes].view()
        weakref.finalize(loan, self._give_back, block).atexit = False
        return torch.from_numpy(loan).view(dtype).view(tuple(shape))

    def idle(self) -> int:
        """Bytes that wait for the next request."""
        return sum(block.numel() for block in self._idle)

    def clear(self) -> None:
        """Give all idle memory back to the system."""
        with self._lock:
            self._idle.clear()

    def _take(self, nbytes: int) -> Tensor | None:
        with self._lock:
            fitting = [block for block in self._idle if nbytes <= block.numel() <= nbytes * SLACK]
            if not fitting:
                return None
            best = min(fitting, key=torch.Tensor.numel)
            self._idle = [block for block in self._idle if block is not best]
            return best

    def _give_back(self, block: Tensor) -> None:
        with self._lock:
            self._idle.append(block)
            while self.idle() > self.idle_bytes:
                self._idle.pop(0)


_pool = Pool()


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialized tensor of the dtype and device of `like`, from the pool where that is the CPU's memory."""
    if like.device.type != "cpu" or torch.compiler.is_compiling():
        return like.new_empty(tuple(shape))
    return _pool.empty(shape, like.dtype)


def clear() -> None:
    """Give the pool's idle memory back to the system."""
    _pool.clear()
