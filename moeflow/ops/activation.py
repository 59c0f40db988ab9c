"""Activations of the experts, with their derivatives written out.

Legend: R rows, F ffn.

A gated activation (GLU, arXiv:2002.05202) takes both halves of the hidden layer: act(gate) * up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from moeflow.errors import ConfigError, did_you_mean

_aten = torch.ops.aten

# Plain functions, the same with a tensor to write to, and derivatives that are written over the gradient.
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": _aten.relu.default,
    "gelu": functools.partial(_aten.gelu.default, approximate="none"),
    "gelu_tanh": functools.partial(_aten.gelu.default, approximate="tanh"),
    "silu": _aten.silu.default,
}
_INTO: dict[str, Callable[..., Tensor]] = {
    "relu": functools.partial(_aten.clamp_min.out, min=0),  # relu.out makes another tensor first, and copies
    "gelu": functools.partial(_aten.gelu.out, approximate="none"),
    "gelu_tanh": functools.partial(_aten.gelu.out, approximate="tanh"),
    "silu": _aten.silu.out,
}


def _relu_grad(grad: Tensor, pre: Tensor) -> Tensor:
    return _aten.threshold_backward.grad_input(grad, pre, 0, grad_input=grad)


def _gelu_grad(grad: Tensor, pre: Tensor, approximate: str = "none") -> Tensor:
    return _aten.gelu_backward.grad_input(grad, pre, approximate=approximate, grad_input=grad)


def _silu_grad(grad: Tensor, pre: Tensor) -> Tensor:
    return _aten.silu_backward.grad_input(grad, pre, grad_input=grad)


_DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": _relu_grad,
    "gelu": _gelu_grad,
    "gelu_tanh": functools.partial(_gelu_grad, approximate="tanh"),
    "silu": _silu_grad,
}
_GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}
NAMES = (*_PLAIN, *_GATED)


def check(name: str) -> str:
    """Return `name`, or raise ConfigError when there is no such activation."""
    if name not in NAMES:
        raise ConfigError(
            f"activation={name!r}: no such activation; valid: {', '.join(NAMES)}.{did_you_mean(name, NAMES)}"
        )
    return name


def is_gated(name: str) -> bool:
    """Whether the activation takes two halves."""
    return name in _GATED


def keeps_output(name: str) -> bool:
    """Whether the result is all that the derivative needs, so that it may be written over the input."""
    return name == "relu"


def forward(name: str, pre: Tensor, out: Tensor | None = None) -> Tensor:
    """Apply an activation.

    Args:
        name: one of NAMES.
        pre: [R, F], or [R, 2, F] (gate, up) for a gated one.
        out: [R, F] to write to, where no gradient is wanted; None takes new memory.

    Returns:
        [R, F].
    """
    pointwise = _GATED.get(name, name)
    pre_RF = pre[:, 0] if is_gated(name) else pre
    if out is None:
        hidden_RF = _PLAIN[pointwise](pre_RF)
        return hidden_RF * pre[:, 1] if is_gated(name) else hidden_RF
    _INTO[pointwise](pre_RF, out=out)
    return out.mul_(pre[:, 1]) if is_gated(name) else out


def backward(name: str, grad_RF: Tensor, pre: Tensor, out: Tensor | None = None) -> Tensor:
    """Gradient of `forward` with respect to `pre`, in the shape of `pre`.

    Args:
        name: one of NAMES.
        grad_RF: [R, F], gradient of the result; overwritten.
        pre: as in `forward`.
        out: of the shape of `pre`, to write to where the activation is gated; None takes new memory.
    """
    pointwise = _GATED.get(name, name)
    derivative = _DERIVATIVES[pointwise]
    if not is_gated(name):
        return derivative(grad_RF, pre)
    gate_RF, up_RF = pre[:, 0], pre[:, 1]
    grad_pre = torch.empty_like(pre) if out is None else out
    _INTO[pointwise](gate_RF, out=grad_pre[:, 1]).mul_(grad_RF)
    grad_pre[:, 0] = derivative(grad_RF.mul_(up_RF), gate_RF)
    return grad_pre
