"""Kernels that move whole rows: dispatch, combine, both gradients, and the order of rows around an all-to-all.

Legend: T tokens, D model, K top-k, R rows (dispatched choices).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeflow.ops._cupy import CPP_NAME, KernelError
from moeflow.ops.kernel_calls.checks import (
    FLOATS,
    INT32,
    INT64,
    access_bytes,
    access_width,
    choices_held,
    engine_for,
    require,
    require_int32,
    row_block,
)
from moeflow.ops.regroup import MAX_SEGMENTS


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
    run = engine_for(x_TD)
    num_tokens, width = x_TD.shape
    num_rows, top_k = slot_of_row_R.shape[0], row_of_TK.shape[1]
    require("x", x_TD, None, FLOATS, (None, None))
    require("row_of", row_of_TK, x_TD, INT32, (num_tokens, None))
    require("slot_of_row", slot_of_row_R, x_TD, INT32, (None,))
    require_int32(max(num_rows, row_of_TK.numel()))
    rows_RD = run.empty((num_rows, width), dtype=x_TD.dtype, device=x_TD.device)
    if rows_RD.numel() == 0:
        return rows_RD
    moved = access_width(width, x_TD, rows_RD)
    block = row_block(width // moved)
    run.launch(
        x_TD.device,
        "permute",
        "dispatch_rows",
        (CPP_NAME[x_TD.dtype], moved, choices_held(top_k)),
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
    run = engine_for(rows_RD)
    (num_tokens, top_k), width = row_of_TK.shape, rows_RD.shape[1]
    require("rows", rows_RD, None, FLOATS, (None, None))
    require("row_of", row_of_TK, rows_RD, INT32, (None, None))
    weights_TK = _weights(weights_TK, row_of_TK)
    y_TD = run.empty((num_tokens, width), dtype=rows_RD.dtype, device=rows_RD.device)
    if y_TD.numel() == 0:
        return y_TD
    moved = access_width(width, rows_RD, y_TD)
    block = row_block(width // moved)
    run.launch(
        rows_RD.device,
        "permute",
        "combine_rows",
        (CPP_NAME[rows_RD.dtype], moved, choices_held(top_k)),
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
    require("weights", weights_TK, row_of_TK, (torch.float32,), tuple(row_of_TK.shape))
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
    run = engine_for(rows_RD)
    (num_tokens, top_k), (num_rows, width) = row_of_TK.shape, rows_RD.shape
    require("rows", rows_RD, None, FLOATS, (None, None))
    require("grad", grad_TD, rows_RD, (rows_RD.dtype,), (num_tokens, width))
    require("row_of", row_of_TK, rows_RD, INT32, (None, None))
    require("slot_of_row", slot_of_row_R, rows_RD, INT32, (num_rows,))
    wide_weights_TK = _weights(weights_TK, row_of_TK)
    grad_rows_RD = run.empty((num_rows, width), dtype=rows_RD.dtype, device=rows_RD.device)
    grad_weights_TK = run.empty((num_tokens, top_k), dtype=torch.float32, device=rows_RD.device)
    if num_tokens and top_k:
        moved = access_width(width, grad_TD, rows_RD, grad_rows_RD)
        block = row_block(width // moved, least=32)
        run.launch(
            rows_RD.device,
            "permute",
            "combine_rows_backward",
            (CPP_NAME[rows_RD.dtype], moved, choices_held(top_k)),
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


def regroup(rows: Tensor, counts_PE: Tensor, inverse: bool = False) -> Tensor:
    """Bring rows from the order (source rank, local expert) into (local expert, source rank), or back.

    Args:
        rows: [R, D] of any dtype of 2, 4 or 8 bytes.
        counts_PE: int64 [ranks, local experts], rows of each pair; sums to R.
        inverse: take rows that are in the experts' order back to the ranks' order.

    Returns:
        rows of the same shape.
    """
    run = engine_for(rows)
    (num_rows, width), (num_ranks, num_experts) = rows.shape, counts_PE.shape
    require("rows", rows, None, (rows.dtype,), (None, None))
    require("counts", counts_PE, rows, INT64, (None, None))
    row_bytes, num_segments = width * rows.element_size(), num_ranks * num_experts
    if num_segments > MAX_SEGMENTS or row_bytes % 2:
        raise KernelError(
            f"regroup: {num_segments} segments of rows of {row_bytes} bytes; the kernel takes up to {MAX_SEGMENTS} "
            "segments and an even number of bytes"
        )
    out = run.empty((num_rows, width), dtype=rows.dtype, device=rows.device)
    if out.numel() == 0:
        return out
    moved = access_bytes(row_bytes, rows, out)
    block = row_block(row_bytes // moved)
    run.launch(
        rows.device,
        "regroup",
        "regroup_rows",
        (moved, "true" if inverse else "false"),
        run.num_blocks(-(-num_rows // block[1]), rows.device),
        block,
        (
            rows,
            out,
            counts_PE,
            np.int64(num_rows),
            np.int32(num_ranks),
            np.int32(num_experts),
            np.int64(row_bytes),
        ),
        shared=8 * num_segments,
    )
    return out
