"""Rows from the order in which an all-to-all brings them to the order of the experts, and back.

Legend: R rows, D model, P ranks, E experts on this rank.

The gradient of either direction is the other one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeflow.ops import backend

#: The CUDA kernel keeps two tables of this many entries in shared memory.
MAX_SEGMENTS = 4096


def regroup(rows_RD: Tensor, counts_PE: Tensor, inverse: bool = False) -> Tensor:
    """Bring rows from the order (source rank, expert) into (expert, source rank), or back.

    Args:
        rows_RD: [R, D].
        counts_PE: int64 [P, E], rows of each pair; sums to R.
        inverse: take rows that are ordered by expert back to the order by rank.

    Returns:
        [R, D], the same rows.
    """
    if min(counts_PE.shape) <= 1:
        return rows_RD  # both orders are the same
    return _regroup(rows_RD, counts_PE, inverse)


def expert_major(counts_PE: Tensor) -> Tensor:
    """Order that turns rows sorted by (source rank, expert) into rows sorted by (expert, source rank).

    Args:
        counts_PE: int64 [P, E].

    Returns:
        int64 [R]: entry r is the row, in the first order, that comes r-th in the second.

    Example: counts [[1, 2], [1, 1]] give [0, 3, 1, 2, 4].
    """
    num_rows = int(counts_PE.sum())
    first_PE = (torch.cumsum(counts_PE.flatten(), 0) - counts_PE.flatten()).view_as(counts_PE)
    block_N = counts_PE.t().reshape(-1)
    start_N = torch.cumsum(block_N, 0) - block_N
    shift_R = torch.repeat_interleave(first_PE.t().reshape(-1) - start_N, block_N, output_size=num_rows)
    return torch.arange(num_rows, device=counts_PE.device) + shift_R


@torch.library.custom_op("moeflow::regroup", mutates_args=())
def _regroup(rows_RD: Tensor, counts_PE: Tensor, inverse: bool) -> Tensor:
    if counts_PE.numel() <= MAX_SEGMENTS and backend.use_cupy("regroup", rows_RD):
        from moeflow.ops import kernel_calls

        return kernel_calls.regroup(rows_RD.contiguous(), counts_PE.contiguous(), inverse)
    order_R = expert_major(counts_PE)
    if not inverse:
        return rows_RD.index_select(0, order_R)
    return torch.empty_like(rows_RD).index_copy_(0, order_R, rows_RD)


@_regroup.register_fake
def _(rows_RD: Tensor, counts_PE: Tensor, inverse: bool) -> Tensor:
    return torch.empty_like(rows_RD)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, counts_PE, ctx.inverse = inputs
    ctx.save_for_backward(counts_PE)


def _backward(ctx: Any, grad_RD: Tensor) -> Any:
    return _regroup(grad_RD.contiguous(), *ctx.saved_tensors, not ctx.inverse), None, None


_regroup.register_autograd(_backward, setup_context=_setup)
