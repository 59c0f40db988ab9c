"""Dispatch and combine: tokens to rows ordered by expert, and back.

Legend: T tokens, D model, K top-k, R rows (dispatched choices).

The two are each other's gradient: dispatch copies, so its gradient sums (combine without weights); combine sums, so its
gradient copies (and weights).  Sums run over k in a fixed order in fp32, so results are the same on every run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moeflow.ops import backend, pool
from moeflow.ops.plan import DispatchPlan

# Rows that are worked on at once on CPUs: with their gradient and product, a part of a core's second-level cache.
_PIECE_BYTES = 2**18


def dispatch(x_TD: Tensor, plan: DispatchPlan) -> Tensor:
    """Copy each token to the row of each of its choices.

    Args:
        x_TD: [T, D].
        plan: of the same T.

    Returns:
        rows [R, D] in the dtype of x, ordered by expert.
    """
    return _dispatch(x_TD, plan.row_of_TK, plan.slot_of_row_R, plan.padded)


def combine(rows_RD: Tensor, plan: DispatchPlan, weights_TK: Tensor | None = None) -> Tensor:
    """Sum the rows of each token's choices, weighted.

    Args:
        rows_RD: [R, D].
        plan: the plan that dispatched the rows.
        weights_TK: [T, K] floating point, or None for a plain sum.  A dropped choice adds nothing, whatever its weight.

    Returns:
        y [T, D] in the dtype of the rows.
    """
    if weights_TK is None:
        return _gather_sum(rows_RD, plan.row_of_TK, plan.slot_of_row_R, plan.padded)
    return _combine(rows_RD, weights_TK, plan.row_of_TK, plan.slot_of_row_R, plan.padded)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums: fp32 for half types."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _rows_of_choice(rows_RD: Tensor, row_of_T: Tensor) -> Tensor:
    """Rows of one choice of each token, zero where it was dropped: [T, D]."""
    if rows_RD.shape[0] == 0:
        return rows_RD.new_zeros(row_of_T.shape[0], rows_RD.shape[1])
    picked_TD = rows_RD.index_select(0, row_of_T.clamp(min=0))
    # masked_fill and not a product: a row may hold inf or nan.
    return picked_TD.masked_fill_((row_of_T < 0)[:, None], 0)


def weighted_gather(rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Plain PyTorch statement of combine: y_t = sum_k w_tk rows[row_of_tk], over k in order."""
    out_dtype, dtype = rows_RD.dtype, _wide(rows_RD.dtype)
    y_TD = torch.zeros(row_of_TK.shape[0], rows_RD.shape[1], dtype=dtype, device=rows_RD.device)
    if weights_TK is not None:
        # The weight of a dropped choice may be inf or nan as well.
        weights_TK = weights_TK.to(dtype).masked_fill(row_of_TK < 0, 0)
    for k in range(row_of_TK.shape[1]):
        picked_TD = _rows_of_choice(rows_RD, row_of_TK[:, k]).to(dtype)
        if weights_TK is None:
            y_TD += picked_TD
        else:
            y_TD.addcmul_(picked_TD, weights_TK[:, k : k + 1])
    return y_TD.to(out_dtype)


def _gather(rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None, padded: bool) -> Tensor:
    """`weighted_gather`, in one pass over the rows where that is possible: on a CPU, when no choice was dropped."""
    none_dropped = not padded and rows_RD.shape[0] == row_of_TK.numel() > 0
    if not none_dropped or rows_RD.device.type != "cpu" or rows_RD.dtype not in (torch.float32, torch.float64):
        return weighted_gather(rows_RD, row_of_TK, weights_TK)
    weights_TK = None if weights_TK is None else weights_TK.to(rows_RD.dtype)
    return functional.embedding_bag(row_of_TK, rows_RD.contiguous(), per_sample_weights=weights_TK, mode="sum")


@torch.library.custom_op("moeflow::dispatch", mutates_args=())
def _dispatch(x_TD: Tensor, row_of_TK: Tensor, slot_of_row_R: Tensor, padded: bool) -> Tensor:
    if backend.use_cupy("dispatch", x_TD):
        from moeflow.ops import kernel_calls

        return kernel_calls.dispatch(x_TD.contiguous(), row_of_TK, slot_of_row_R, padded)
    return _rows_of_tokens(x_TD, row_of_TK.shape[1], slot_of_row_R, padded)


def _rows_of_tokens(x_TD: Tensor, top_k: int, slot_of_row_R: Tensor, padded: bool) -> Tensor:
    """The token of each row, zero in rows that pad: [R, D]."""
    if x_TD.shape[0] == 0:
        return x_TD.new_zeros(slot_of_row_R.shape[0], x_TD.shape[1])
    if not padded:
        rows_RD = pool.empty_rows((slot_of_row_R.shape[0], x_TD.shape[1]), x_TD)
        return torch.index_select(x_TD, 0, slot_of_row_R // top_k, out=rows_RD)
    rows_RD = x_TD.index_select(0, slot_of_row_R.clamp(min=0) // top_k)
    return rows_RD.masked_fill_((slot_of_row_R < 0)[:, None], 0)


@_dispatch.register_fake
def _(x_TD: Tensor, row_of_TK: Tensor, slot_of_row_R: Tensor, padded: bool) -> Tensor:
    return x_TD.new_empty(slot_of_row_R.shape[0], x_TD.shape[1])


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, row_of_TK, slot_of_row_R, ctx.padded = inputs
    ctx.save_for_backward(row_of_TK, slot_of_row_R)


def _dispatch_backward(ctx: Any, grad_rows_RD: Tensor) -> Any:
    return _gather_sum(grad_rows_RD.contiguous(), *ctx.saved_tensors, ctx.padded), None, None, None


_dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)


@torch.library.custom_op("moeflow::gather_sum", mutates_args=())
def _gather_sum(rows_RD: Tensor, row_of_TK: Tensor, slot_of_row_R: Tensor, padded: bool) -> Tensor:
    if backend.use_cupy("combine", rows_RD):
        from moeflow.ops import kernel_calls

        return kernel_calls.combine(rows_RD.contiguous(), row_of_TK, None)
    return _gather(rows_RD, row_of_TK, None, padded)


@_gather_sum.register_fake
def _(rows_RD: Tensor, row_of_TK: Tensor, slot_of_row_R: Tensor, padded: bool) -> Tensor:
    return rows_RD.new_empty(row_of_TK.shape[0], rows_RD.shape[1])


def _gather_sum_backward(ctx: Any, grad_TD: Tensor) -> Any:
    return _dispatch(grad_TD.contiguous(), *ctx.saved_tensors, ctx.padded), None, None, None


_gather_sum.register_autograd(_gather_sum_backward, setup_context=_dispatch_setup)


@torch.library.custom_op("moeflow::combine", mutates_args=())
def _combine(rows_RD: Tensor, weights_TK: Tensor, row_of_TK: Tensor, slot_of_row_R: Tensor, padded: bool) -> Tensor:
    if backend.use_cupy("combine", rows_RD):
        from moeflow.ops import kernel_calls

        return kernel_calls.combine(rows_RD.contiguous(), row_of_TK, weights_TK)
    return _gather(rows_RD, row_of_TK, weights_TK, padded)


@_combine.register_fake
def _(rows_RD: Tensor, weights_TK: Tensor, row_of_TK: Tensor, slot_of_row_R: Tensor, padded: bool) -> Tensor:
    return rows_RD.new_empty(row_of_TK.shape[0], rows_RD.shape[1])


@torch.library.custom_op("moeflow::combine_backward", mutates_args=())
def _combine_backward(
    grad_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, row_of_TK: Tensor, slot_of_row_R: Tensor, padded: bool
) -> tuple[Tensor, Tensor]:
    if backend.use_cupy("combine", rows_RD):
        from moeflow.ops import kernel_calls

        return kernel_calls.combine_backward(
            grad_TD, rows_RD.contiguous(), weights_TK, row_of_TK, slot_of_row_R, padded
        )
    dtype = _wide(rows_RD.dtype)
    if not padded and dtype == rows_RD.dtype == grad_TD.dtype and rows_RD.device.type == "cpu" and rows_RD.numel():
        return _combine_backward_in_pieces(grad_TD, rows_RD, weights_TK, slot_of_row_R)
    grad_of_row_RD = _rows_of_tokens(grad_TD, row_of_TK.shape[1], slot_of_row_R, padded).to(dtype)
    dot_R = (grad_of_row_RD * rows_RD).sum(dim=1, dtype=dtype)
    # Padding rows read and write one entry more, which is cut off.
    slots_R = slot_of_row_R.to(torch.int64)
    if padded:
        slots_R = torch.where(slots_R < 0, weights_TK.numel(), slots_R)
    grad_weights_N = torch.zeros(weights_TK.numel() + 1, dtype=dtype, device=rows_RD.device)
    grad_weights_N[slots_R] = dot_R
    weights_N = torch.cat([weights_TK.reshape(-1).to(dtype), grad_weights_N.new_zeros(1)])
    grad_rows_RD = grad_of_row_RD.mul_(weights_N.index_select(0, slots_R)[:, None])
    grad_weights_TK = grad_weights_N[:-1].view_as(weights_TK).to(weights_TK.dtype, copy=True)
    return grad_rows_RD.to(rows_RD.dtype), grad_weights_TK


def _combine_backward_in_pieces(
    grad_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, slot_of_row_R: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, a few rows at a time, while they are in the cache: half the time of whole passes."""
    num_rows, width = rows_RD.shape
    slots_R = slot_of_row_R.to(torch.int64)
    tokens_R = slots_R // weights_TK.shape[1]
    weights_R1 = weights_TK.reshape(-1).to(rows_RD.dtype).index_select(0, slots_R)[:, None]
    grad_rows_RD, dot_R = pool.empty_rows(rows_RD.shape, rows_RD), rows_RD.new_empty(num_rows)
    piece = max(1, _PIECE_BYTES // (width * rows_RD.element_size()))
    product = rows_RD.new_empty(min(piece, num_rows), width)
    for lo in range(0, num_rows, piece):
        hi = min(lo + piece, num_rows)
        grad_rows = torch.index_select(grad_TD, 0, tokens_R[lo:hi], out=grad_rows_RD[lo:hi])
        torch.sum(torch.mul(grad_rows, rows_RD[lo:hi], out=product[: hi - lo]), 1, out=dot_R[lo:hi])
        grad_rows.mul_(weights_R1[lo:hi])
    grad_weights_N = rows_RD.new_zeros(weights_TK.numel()).index_copy_(0, slots_R, dot_R)
    return grad_rows_RD, grad_weights_N.view_as(weights_TK).to(weights_TK.dtype)


@_combine_backward.register_fake
def _(grad_TD, rows_RD, weights_TK, row_of_TK, slot_of_row_R, padded):
    return torch.empty_like(rows_RD), torch.empty_like(weights_TK)


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.padded = inputs
    ctx.save_for_backward(*tensors)


def _combine_grad(ctx: Any, grad_TD: Tensor) -> Any:
    grads = _combine_backward(grad_TD.contiguous(), *ctx.saved_tensors, ctx.padded)
    return *grads, None, None, None


_combine.register_autograd(_combine_grad, setup_context=_combine_setup)
