"""One linear map for each expert, over rows that are ordered by expert.

Legend: R rows, I input width, O output width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeflow.ops import grouped_gemm


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


@torch.library.custom_op("moeflow::grouped_linear", mutates_args=())
def _grouped_linear(rows_RI: Tensor, tokens_per_expert_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None) -> Tensor:
    of = _groups(rows_RI, tokens_per_expert_E, weight_EOI)
    return grouped_gemm.linear(rows_RI, weight_EOI, bias_EO, of)


def _groups(rows_RI: Tensor, tokens_per_expert_E: Tensor, weight_EOI: Tensor) -> grouped_gemm.Groups:
    return grouped_gemm.groups(tokens_per_expert_E, rows_RI.shape[0], grouped_gemm.use_grouped(rows_RI, weight_EOI))


@_grouped_linear.register_fake
def _(rows_RI, tokens_per_expert_E, weight_EOI, bias_EO):
    return rows_RI.new_empty(rows_RI.shape[0], weight_EOI.shape[1])


@torch.library.custom_op("moeflow::grouped_linear_backward", mutates_args=())
def _grouped_linear_backward(
    grad_RO: Tensor, rows_RI: Tensor, tokens_per_expert_E: Tensor, weight_EOI: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of = _groups(rows_RI, tokens_per_expert_E, weight_EOI)
    return (
        grouped_gemm.grad_rows(grad_RO, weight_EOI, of),
        grouped_gemm.grad_weight(grad_RO, rows_RI, of),
        grouped_gemm.grad_bias(grad_RO, of) if has_bias else rows_RI.new_empty(0),
    )


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
