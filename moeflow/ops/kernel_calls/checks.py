"""What all kernel calls share: checks of tensors, width of accesses, shape of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow.ops._cupy import CPP_NAME, Engine, KernelError, engine

FLOATS = tuple(CPP_NAME)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
THREADS = 256
MAX_INT32 = 2**31 - 1


def require(
    name: str,
    tensor: Tensor,
    like: Tensor | None,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple,
) -> None:
    """Check what a kernel takes for granted; None in `shape` leaves a size open."""
    if tensor.dtype not in dtypes:
        wanted = ", ".join(str(each).removeprefix("torch.") for each in dtypes)
        raise KernelError(
            f"{name} is {tensor.dtype}: the kernel takes {wanted}",
            f"convert {name}, or MOEFLOW_OPS=torch",
        )
    if tensor.dim() != len(shape) or any(
        want not in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    ):
        raise KernelError(f"{name} has shape {tuple(tensor.shape)}: the kernel takes {shape}")
    if not tensor.is_contiguous():
        raise KernelError(
            f"{name} is not contiguous (strides {tensor.stride()})",
            f"pass {name}.contiguous()",
        )
    if like is not None and tensor.device != like.device:
        raise KernelError(f"{name} is on {tensor.device}, and the other tensors are on {like.device}")


def engine_for(tensor: Tensor) -> Engine:
    """The engine, once the tensor is known to lie where kernels run."""
    chosen = engine()
    if tensor.device.type != chosen.device_type:
        raise KernelError(f"the kernels run on {chosen.device_type} tensors, and one is on {tensor.device}")
    return chosen


def access_width(row_length: int, *tensors: Tensor) -> int:
    """Values moved at once: as many as make 16 bytes, divide a row, and suit the alignment of every tensor."""
    size = tensors[0].element_size()
    width = 16 // size
    while width > 1 and (
        row_length % width or any(tensor.data_ptr() % (width * size) for tensor in tensors if tensor.numel())
    ):
        width //= 2
    return width


def row_block(vectors: int, least: int = 8) -> tuple[int, int]:
    """Block (X, Y): X threads on one row, at most THREADS in all."""
    x = least
    while x < min(vectors, THREADS):
        x *= 2
    return x, THREADS // x


def choices_held(top_k: int) -> int:
    """Choices that a kernel holds at once: 1, 2, 4 or 8."""
    return next((count for count in (1, 2, 4) if top_k <= count), 8)


def access_bytes(row_bytes: int, *tensors: Tensor) -> int:
    """Bytes moved at once: 16, or less where a row's size or the alignment of a tensor asks for it."""
    count = 16
    while count > 2 and (row_bytes % count or any(tensor.data_ptr() % count for tensor in tensors if tensor.numel())):
        count //= 2
    return count


def require_int32(count: int) -> None:
    """Row numbers and slots are 32-bit."""
    if count > MAX_INT32:
        raise KernelError(f"{count} rows or choices: the kernels number them with 31 bits", "split the batch")
