"""One typed Python function for each CUDA kernel: checks the tensors, allocates the outputs, chooses the launch.

Legend: T tokens, D model, E experts, K top-k, R rows (dispatched choices).

The kernels take fp32, bf16 and fp16, contiguous, and sum in fp32.  Nothing here waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeflow.ops._cupy import CPP_NAME, Engine, KernelError, engine

THREADS = 256
MAX_INT32 = 2**31 - 1


def _require(
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


def _engine_for(tensor: Tensor) -> Engine:
    chosen = engine()
    if tensor.device.type != chosen.device_type:
        raise KernelError(f"the kernels run on {chosen.device_type} tensors, and one is on {tensor.device}")
    return chosen


def _width(row_length: int, *tensors: Tensor) -> int:
    """Values moved at once: as many as make 16 bytes, divide a row, and suit the alignment of every tensor."""
    size = tensors[0].element_size()
    width = 16 // size
    while width > 1 and (
        row_length % width or any(tensor.data_ptr() % (width * size) for tensor in tensors if tensor.numel())
    ):
        width //= 2
    return width


def _block(vectors: int, least: int = 8) -> tuple[int, int]:
    """Block (X, Y): X threads on one row, at most THREADS in all."""
    x = least
    while x < min(vectors, THREADS):
        x *= 2
    return x, THREADS // x


def _choices(top_k: int) -> int:
    """Choices that a kernel holds at once: 1, 2, 4 or 8."""
    return next((count for count in (1, 2, 4) if top_k <= count), 8)


FLOATS = tuple(CPP_NAME)
INT32 = (torch.int32,)


def dispatch(x_TD: Tensor, row_of_TK: Tensor, slot_of_row_R: Tensor, padded: bool = False) -> Tensor:
    """Copy each token to the rows of its choices.

    Args:
        x_TD: [T, D].
        row_of_TK: int32 [T, K], -1 where a choice was dropped.
        slot_of_row_R: int32 [R]; rows with -1 are padding.
        padded: whether there is any padding, which is then set to zero.

    Returns:
        rows [R, D].
    """
    run = _engine_for(x_TD)
    num_tokens, width = x_TD.shape
    num_rows, top_k = slot_of_row_R.shape[0], row_of_TK.shape[1]
    _require("x", x_TD, None, FLOATS, (None, None))
    _require("row_of", row_of_TK, x_TD, INT32, (num_tokens, None))
    _require("slot_of_row", slot_of_row_R, x_TD, INT32, (None,))
    rows_RD = run.empty((num_rows, width), dtype=x_TD.dtype, device=x_TD.device)
    if rows_RD.numel() == 0:
        return rows_RD
    moved = _width(width, x_TD, rows_RD)
    block = _block(width // moved)
    run.launch(
        x_TD.device,
        "permute",
        "dispatch_rows",
        (CPP_NAME[x_TD.dtype], moved, _choices(top_k)),
        run.num_blocks(-(-max(num_tokens, num_rows if padded else 0) // block[1]), x_TD.device),
        block,
        (
            x_TD,
            row_of_TK,
            slot_of_row_R if padded else None,
            rows_RD,
            np.int64(num_tokens),
            np.int64(num_rows),
            np.int32(top_k),
            np.int64(width),
        ),
    )
    return rows_RD


def combine(rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum the rows of each token's choices, weighted; the gradient of `dispatch` when there are no weights.

    Args:
        rows_RD: [R, D].
        row_of_TK: int32 [T, K], -1 where a choice was dropped.
        weights_TK: [T, K] floating point, or None.

    Returns:
        y [T, D] in the dtype of the rows.
    """
    run = _engine_for(rows_RD)
    (num_tokens, top_k), width = row_of_TK.shape, rows_RD.shape[1]
    _require("rows", rows_RD, None, FLOATS, (None, None))
    _require("row_of", row_of_TK, rows_RD, INT32, (None, None))
    weights_TK = _weights(weights_TK, row_of_TK)
    y_TD = run.empty((num_tokens, width), dtype=rows_RD.dtype, device=rows_RD.device)
    if y_TD.numel() == 0:
        return y_TD
    moved = _width(width, rows_RD, y_TD)
    block = _block(width // moved)
    run.launch(
        rows_RD.device,
        "permute",
        "combine_rows",
        (CPP_NAME[rows_RD.dtype], moved, _choices(top_k)),
        run.num_blocks(-(-num_tokens // block[1]), rows_RD.device),
        block,
        (
            rows_RD,
            row_of_TK,
            weights_TK,
            y_TD,
            np.int64(num_tokens),
            np.int32(top_k),
            np.int64(width),
        ),
    )
    return y_TD


def _weights(weights_TK: Tensor | None, row_of_TK: Tensor) -> Tensor | None:
    """Routing weights as the kernels read them: fp32 (4 T K bytes, against the rows' 2 T K D)."""
    if weights_TK is None:
        return None
    weights_TK = weights_TK.to(torch.float32).contiguous()
    _require("weights", weights_TK, row_of_TK, (torch.float32,), tuple(row_of_TK.shape))
    return weights_TK


def combine_backward(
    grad_TD: Tensor,
    rows_RD: Tensor,
    weights_TK: Tensor,
    row_of_TK: Tensor,
    slot_of_row_R: Tensor,
    padded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Both gradients of a weighted `combine`, in one pass.

    Returns:
        grad_rows [R, D] in the dtype of the rows, and grad_weights [T, K] in the dtype of the weights.
    """
    run = _engine_for(rows_RD)
    (num_tokens, top_k), (num_rows, width) = row_of_TK.shape, rows_RD.shape
    _require("rows", rows_RD, None, FLOATS, (None, None))
    _require("grad", grad_TD, rows_RD, (rows_RD.dtype,), (num_tokens, width))
    _require("row_of", row_of_TK, rows_RD, INT32, (None, None))
    _require("slot_of_row", slot_of_row_R, rows_RD, INT32, (num_rows,))
    wide_weights_TK = _weights(weights_TK, row_of_TK)
    grad_rows_RD = run.empty((num_rows, width), dtype=rows_RD.dtype, device=rows_RD.device)
    grad_weights_TK = run.empty((num_tokens, top_k), dtype=torch.float32, device=rows_RD.device)
    if num_tokens and top_k:
        moved = _width(width, grad_TD, rows_RD, grad_rows_RD)
        block = _block(width // moved, least=32)
        run.launch(
            rows_RD.device,
            "permute",
            "combine_rows_backward",
            (CPP_NAME[rows_RD.dtype], moved, _choices(top_k)),
            run.num_blocks(
                -(-max(num_tokens, num_rows if padded else 0) // block[1]),
                rows_RD.device,
            ),
            block,
            (
                grad_TD,
                rows_RD,
                row_of_TK,
                wide_weights_TK,
                slot_of_row_R if padded else None,
                grad_rows_RD,
                grad_weights_TK,
                np.int64(num_tokens),
                np.int64(num_rows),
                np.int32(top_k),
                np.int64(width),
            ),
        )
    return grad_rows_RD, grad_weights_TK.to(weights_TK.dtype)
