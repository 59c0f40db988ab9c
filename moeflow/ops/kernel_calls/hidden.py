"""Kernels of the experts' hidden layer: activations, plain or gated, with the routing weight on request.

Legend: R rows, F ffn, N slots (T * K choices).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moeflow.ops._cupy import CPP_NAME, KernelError
from moeflow.ops.kernel_calls.checks import FLOATS, INT32, access_width, engine_for, require, row_block

_NUMBER = {"relu": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}
_GATED = {"reglu": "relu", "swiglu": "silu", "geglu": "gelu"}
NAMES = (*_NUMBER, *_GATED)


def _kind(name: str) -> tuple[int, bool]:
    if name not in NAMES:
        raise KernelError(f"activation {name!r}: the kernels know {', '.join(NAMES)}")
    return _NUMBER[_GATED.get(name, name)], name in _GATED


def _check(pre: Tensor, gated: bool, weights_N: Tensor | None, slot_of_row_R: Tensor | None) -> tuple[int, int]:
    require("pre", pre, None, FLOATS, (None, 2, None) if gated else (None, None))
    if (weights_N is None) != (slot_of_row_R is None):
        raise KernelError("an activation with routing weights needs both weights and slot_of_row")
    if weights_N is not None and slot_of_row_R is not None:
        require("weights", weights_N, pre, (torch.float32,), (None,))
        require("slot_of_row", slot_of_row_R, pre, INT32, (pre.shape[0],))
    return pre.shape[0], pre.shape[-1]


def activation(name: str, pre: Tensor, weights_N: Tensor | None = None, slot_of_row_R: Tensor | None = None) -> Tensor:
    """Apply an activation, and the routing weight of each row if given.

    Args:
        name: one of NAMES.
        pre: [R, F], or [R, 2, F] (gate, up) for a gated one.
        weights_N: fp32 [T * K], weight of each choice, or None.
        slot_of_row_R: int32 [R], choice of each row; rows with -1 give zeros.  Goes with weights_N.

    Returns:
        hidden [R, F].
    """
    number, gated = _kind(name)
    run = engine_for(pre)
    num_rows, width = _check(pre, gated, weights_N, slot_of_row_R)
    hidden_RF = run.empty((num_rows, width), dtype=pre.dtype, device=pre.device)
    if hidden_RF.numel() == 0:
        return hidden_RF
    moved = access_width(width, pre, hidden_RF)
    block = row_block(width // moved)
    run.launch(
        pre.device,
        "activation",
        "activation_forward",
        (CPP_NAME[pre.dtype], moved, number, _cpp(gated), _cpp(weights_N is not None)),
        run.num_blocks(-(-num_rows // block[1]), pre.device),
        block,
        (
            pre,
            weights_N,
            slot_of_row_R,
            hidden_RF,
            np.int64(num_rows),
            np.int64(width),
            np.int64(width * (2 if gated else 1)),
        ),
    )
    return hidden_RF


def activation_backward(
    name: str,
    grad_RF: Tensor,
    pre: Tensor,
    weights_N: Tensor | None = None,
    slot_of_row_R: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `activation`: of pre, in its shape, and of the weights (fp32 [T * K], or None without weights)."""
    number, gated = _kind(name)
    run = engine_for(pre)
    num_rows, width = _check(pre, gated, weights_N, slot_of_row_R)
    require("grad", grad_RF, pre, (pre.dtype,), (num_rows, width))
    grad_pre = run.empty(tuple(pre.shape), dtype=pre.dtype, device=pre.device)
    grad_weights_N = None
    if weights_N is not None:
        grad_weights_N = run.empty(tuple(weights_N.shape), dtype=torch.float32, device=pre.device).zero_()
    if grad_pre.numel() == 0:
        return grad_pre, grad_weights_N
    moved = access_width(width, grad_RF, pre, grad_pre)
    block = row_block(width // moved, least=8 if weights_N is None else 32)
    run.launch(
        pre.device,
        "activation",
        "activation_backward",
        (CPP_NAME[pre.dtype], moved, number, _cpp(gated), _cpp(weights_N is not None)),
        run.num_blocks(-(-num_rows // block[1]), pre.device),
        block,
        (
            grad_RF,
            pre,
            weights_N,
            slot_of_row_R,
            grad_pre,
            grad_weights_N,
            np.int64(num_rows),
            np.int64(width),
            np.int64(width * (2 if gated else 1)),
        ),
    )
    return grad_pre, grad_weights_N


def _cpp(flag: bool) -> str:
    return "true" if flag else "false"
