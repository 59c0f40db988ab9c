"""Tensors between guard pages: a kernel that leaves its buffer is stopped, or leaves a mark that is found."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch

from tests.cuda_host.host import HostError

PAGE = mmap.PAGESIZE
POISON = 0x7FC0  # NaN in fp32, bf16 and fp16; a huge index
_libc = ctypes.CDLL(None, use_errno=True)


class Arena:
    """Owner of guarded tensors.

    Each tensor lies between two pages that cannot be touched, as near to one of them as its alignment allows; the bytes
    between hold a mark.

    Args:
        side: "end" puts tensors against the page behind them, "start" against the page before.
        offset: bytes by which every pointer misses 16-byte alignment; a multiple of the item size.
    """

    def __init__(self, side: str = "end", offset: int = 0):
        self.side, self.offset = side, offset
        self._buffers: list[tuple[int, int, np.ndarray, np.ndarray, np.ndarray, str]] = []

    def empty(self, shape, dtype: torch.dtype, name: str = "?") -> torch.Tensor:
        """A tensor full of poison."""
        item = torch.empty((), dtype=dtype).element_size()
        count = int(np.prod(shape, dtype=np.int64)) if len(shape) else 1
        offset = self.offset if self.offset % item == 0 else 0
        num_bytes = count * item
        data_pages = max(1, -(-(num_bytes + 32) // PAGE))
        area = mmap.mmap(-1, (data_pages + 2) * PAGE)
        view = np.frombuffer(area, dtype=np.uint8)
        base, inner = view.ctypes.data, data_pages * PAGE
        begin = (inner - num_bytes) // 16 * 16 if self.side == "end" else 0
        if offset:
            begin = begin + offset if self.side == "start" else begin - 16 + offset
        # A NaN too, and another for each tensor: else a copy from beyond one tensor to beyond another leaves no trace.
        mark = np.array([0x7F81 + 37 * len(self._buffers) % 126], np.uint16)
        view[PAGE : PAGE + inner].view(np.uint16)[:] = mark
        first, last = PAGE + begin, PAGE + begin + num_bytes
        for guard in (base, base + PAGE + inner):
            if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(PAGE), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        if num_bytes == 0:
            tensor = torch.empty(shape, dtype=dtype)
        else:
            tensor = torch.frombuffer(area, dtype=dtype, count=count, offset=first).view(*shape)
            fill = np.tile(np.array([POISON], np.uint16).view(np.uint8), -(-num_bytes // 2))[:num_bytes]
            view[first:last] = fill
        self._buffers.append(
            (
                base + first,
                num_bytes,
                view[PAGE:first],
                view[last : PAGE + inner],
                mark,
                name,
            )
        )
        return tensor

    def put(self, tensor: torch.Tensor, name: str = "?") -> torch.Tensor:
        """A guarded copy."""
        guarded = self.empty(tuple(tensor.shape), tensor.dtype, name)
        return guarded.copy_(tensor) if tensor.numel() else guarded

    def knows(self, pointer: int) -> bool:
        """Whether a pointer is the start or the inside of a tensor of this arena."""
        return any(begin <= pointer < begin + max(size, 1) for begin, size, *_ in self._buffers)

    def snapshot(self) -> list[bytes]:
        """Contents of every tensor."""
        return [ctypes.string_at(begin, size) for begin, size, *_ in self._buffers]

    def restore(self, contents: list[bytes]) -> None:
        """Put contents back that `snapshot` gave."""
        for (begin, size, *_), data in zip(self._buffers, contents, strict=True):
            ctypes.memmove(begin, data, size)

    def check(self) -> None:
        """Raise HostError when a mark beside a tensor was overwritten."""
        for _, size, before, after, mark, name in self._buffers:
            for where, margin in (("before", before), ("behind", after)):
                # A buffer of odd size starts or ends in the middle of a 2-byte mark.
                expected = np.tile(mark, len(margin) // 2 + 2).view(np.uint8)
                start = 0 if where == "before" else (len(before) + size) % 2
                if not np.array_equal(margin, expected[start : start + len(margin)]):
                    raise HostError(f"bytes {where} the tensor {name!r} were written")
