"""Auxiliary losses reach the backward pass at the layer's output.

The output passes through unchanged; its backward emits a gradient of `scale` for the loss.  So the loss needs no way up
to the objective: pipeline stages, activation checkpointing and gradient accumulation work without extra plumbing.
(Megatron-LM attaches its auxiliary loss in the same manner.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.like = scale, loss.new_empty(())
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        return grad_y, torch.full_like(ctx.like, ctx.scale), None


def attach_loss(y: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """Return `y`; its backward pass also adds scale * d(loss) to the gradients.

    Args:
        y: the layer's output, any shape.
        loss: 0-dim; already weighted by its coefficient.
        scale: what the main loss is multiplied by before backward (1 / micro-batches, times a gradient scaler's scale).
    """
    return _AttachLoss.apply(y, loss, scale)
