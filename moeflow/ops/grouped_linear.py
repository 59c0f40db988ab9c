"""One linear map for each expert, over rows that are ordered by expert.

Legend: R rows, I input width, O output width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def grouped_linear(rows_RI: Tensor, tokens_per_expert_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None) -> Tensor:
    """Return rows [R, O]: expert e maps its rows x to x weight[e]^T + bias[e].

    Args:
        rows_RI: [R, I], ordered by expert.
        tokens_per_expert_E: int64 [E], rows of each expert; sums to R.
        weight_EOI: [E, O, I].
        bias_EO: [E, O], or None.

    An expert without rows gets a zero gradient, never a missing one.  Under autocast the products run in its dtype.
    """
    device = rows_RI.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows_RI, weight_EOI = rows_RI.to(dtype), weight_EOI.to(dtype)
        bias_EO = None if bias_EO is None else bias_EO.to(dtype)
    return _grouped_linear(rows_RI, tokens_per_expert_E, weight_EOI, bias_EO)


def _bounds(tokens_per_expert_E: Tensor) -> list[tuple[int, int]]:
    """(first row, last row + 1) of each expert."""
    ends = torch.cumsum(tokens_per_expert_E, 0).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@torch.library.custom_op("moeflow::grouped_linear", mutates_args=())
def _grouped_linear(rows_RI: Tensor, tokens_per_expert_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None) -> Tensor:
    out_RO = rows_RI.new_empty(rows_RI.shape[0], weight_EOI.shape[1])
    for e, (lo, hi) in enumerate(_bounds(tokens_per_expert_E)):
        if bias_EO is None:
            torch.mm(rows_RI[lo:hi], weight_EOI[e].t(), out=out_RO[lo:hi])
        else:
            torch.addmm(bias_EO[e], rows_RI[lo:hi], weight_EOI[e].t(), out=out_RO[lo:hi])
    return out_RO


@_grouped_linear.register_fake
def _(rows_RI, tokens_per_expert_E, weight_EOI, bias_EO):
    return rows_RI.new_empty(rows_RI.shape[0], weight_EOI.shape[1])


@torch.library.custom_op("moeflow::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad_RO: Tensor, rows_RI: Tensor, tokens_per_expert_E: Tensor, weight_EOI: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grad_rows_RI = torch.empty_like(rows_RI)
    grad_weight_EOI = torch.empty_like(weight_EOI)
    grad_bias_EO = rows_RI.new_zeros(weight_EOI.shape[:2] if has_bias else (0,))
    for e, (lo, hi) in enumerate(_bounds(tokens_per_expert_E)):
        # A product over no rows gives zeros: the gradient of an idle expert.
        torch.mm(grad_RO[lo:hi].t(), rows_RI[lo:hi], out=grad_weight_EOI[e])
        torch.mm(grad_RO[lo:hi], weight_EOI[e], out=grad_rows_RI[lo:hi])
        if has_bias:
            torch.sum(grad_RO[lo:hi], 0, out=grad_bias_EO[e])
    return grad_rows_RI, grad_weight_EOI, grad_bias_EO


@_grouped_linear_backward.register_fake
def _(grad_RO, rows_RI, tokens_per_expert_E, weight_EOI, has_bias):
    grad_bias = rows_RI.new_empty(weight_EOI.shape[:2] if has_bias else (0,))
    return torch.empty_like(rows_RI), torch.empty_like(weight_EOI), grad_bias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows_RI, tokens_per_expert_E, weight_EOI, bias_EO = inputs
    ctx.save_for_backward(rows_RI, tokens_per_expert_E, weight_EOI)
    ctx.has_bias = bias_EO is not None


def _backward(ctx: Any, grad_RO: Tensor) -> Any:
    grads = _grouped_linear_backward(grad_RO.contiguous(), *ctx.saved_tensors, ctx.has_bias)
    return grads[0], None, grads[1], grads[2] if ctx.has_bias else None


_grouped_linear.register_autograd(_backward, setup_context=_setup_context)
