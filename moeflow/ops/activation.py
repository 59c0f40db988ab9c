"""Activations of the experts, with their derivatives written out.

Legend: R rows, F ffn.

A gated activation (GLU, arXiv:2002.05202) takes both halves of the hidden layer: act(gate) * up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from moeflow.errors import ConfigError, did_you_mean

Function = Callable[[Tensor], Tensor]
Derivative = Callable[[Tensor, Tensor], Tensor]


def _relu_grad(grad: Tensor, pre: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(grad, pre, 0)


def _gelu_grad(grad: Tensor, pre: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, pre, approximate="none")


def _gelu_tanh(pre: Tensor) -> Tensor:
    return functional.gelu(pre, approximate="tanh")


def _gelu_tanh_grad(grad: Tensor, pre: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, pre, approximate="tanh")


def _silu_grad(grad: Tensor, pre: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(grad, pre)


_POINTWISE: dict[str, tuple[Function, Derivative]] = {
    "relu": (functional.relu, _relu_grad),
    "gelu": (functional.gelu, _gelu_grad),
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_grad),
    "silu": (functional.silu, _silu_grad),
}
_GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}
NAMES = (*_POINTWISE, *_GATED)


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


def pointwise(name: str) -> tuple[Function, Derivative]:
    """Return (f, (grad, pre) -> grad * f'(pre)) of an activation, or of the gate of a gated one."""
    return _POINTWISE[_GATED.get(name, name)]


def forward(name: str, pre: Tensor) -> Tensor:
    """Apply an activation.

    Args:
        name: one of NAMES.
        pre: [R, F], or [R, 2, F] (gate, up) for a gated one.

    Returns:
        [R, F].
    """
    function, _ = pointwise(name)
    return function(pre[:, 0]) * pre[:, 1] if is_gated(name) else function(pre)


def backward(name: str, grad_RF: Tensor, pre: Tensor) -> Tensor:
    """Gradient of `forward` with respect to `pre`, in the shape of `pre`."""
    function, derivative = pointwise(name)
    if not is_gated(name):
        return derivative(grad_RF, pre)
    gate_RF, up_RF = pre[:, 0], pre[:, 1]
    grad_pre = torch.empty_like(pre)
    grad_pre[:, 0] = derivative(grad_RF * up_RF, gate_RF)
    torch.mul(grad_RF, function(gate_RF), out=grad_pre[:, 1])
    return grad_pre
