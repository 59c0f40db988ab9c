"""Activations of the hidden layer: the CUDA sources, run on the host, against torch's own in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from moeflow.ops import kernel_calls
from moeflow.ops._cupy import KernelError
from tests.cuda_host.fake_cupy import with_engine
from tests.cuda_host.memory import Arena
from tests.ops.test_kernels_permute import DTYPES, TOLERANCE, random_plan, relative_error

FUNCTIONS = {
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "reglu": functional.relu,
    "swiglu": functional.silu,
    "geglu": functional.gelu,
}
GATED = ("reglu", "swiglu", "geglu")
# (T, K, F, share dropped, padding rows, pointer offset in bytes)
SHAPES = [
    (0, 2, 16, 0.0, 0, 0),
    (1, 1, 1, 0.0, 0, 0),
    (5, 2, 7, 0.2, 1, 0),
    (9, 2, 64, 0.0, 0, 0),
    (3, 4, 1032, 0.3, 2, 0),
    (17, 1, 36, 0.2, 0, 4),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "T{}-K{}-F{}-drop{}-pad{}-off{}".format(*s))
def test_activation(shape, name, dtype, monkeypatch):
    num_tokens, top_k, width, drop, padding, offset = shape
    arena = Arena(side="start" if num_tokens % 2 else "end", offset=offset)
    with_engine(monkeypatch, arena)
    _, slots = random_plan(num_tokens, top_k, drop, padding, seed=width)
    num_rows, gated = len(slots), name in GATED
    generator = torch.Generator().manual_seed(1)
    pre = (3 * torch.randn(num_rows, *([2] if gated else []), width, generator=generator)).to(dtype)
    grad = torch.randn(num_rows, width, generator=generator).to(dtype)
    weights = torch.rand(num_tokens * top_k, generator=generator)
    pre_g, grad_g = arena.put(pre, "pre"), arena.put(grad, "grad")
    slots_g, weights_g = arena.put(slots, "slots"), arena.put(weights, "weights")

    for weighted in (False, True):
        wide, wide_weights = pre.double().requires_grad_(), weights.double().requires_grad_()
        hidden = FUNCTIONS[name](wide[:, 0]) * wide[:, 1] if gated else FUNCTIONS[name](wide)
        if weighted:
            of_row = torch.where(slots >= 0, wide_weights[slots.clamp(min=0).long()] if num_rows else 0.0, 0.0)
            hidden = hidden * of_row[:, None]
        extra = (weights_g, slots_g) if weighted else ()
        got = kernel_calls.activation(name, pre_g, *extra)
        assert got.dtype == dtype and relative_error(got, hidden) < TOLERANCE[dtype]
        got, got_weights = kernel_calls.activation_backward(name, grad_g, pre_g, *extra)
        wanted = torch.autograd.grad((hidden * grad).sum(), (wide, wide_weights), allow_unused=True)
        assert got.shape == pre.shape and relative_error(got, wanted[0]) < TOLERANCE[dtype]
        if weighted:
            assert (got_weights - wanted[1]).abs().max() <= 1e-5 * 10 * width**0.5 if num_tokens else True
        else:
            assert got_weights is None


@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "gelu_tanh"])
def test_extreme_values(name, monkeypatch):
    arena = Arena()
    with_engine(monkeypatch, arena)
    pre = torch.tensor([[0.0, -0.0, 1e-30, 20.0, -20.0, 87.0, -87.0, 89.0, -89.0, 1e4, -1e4, float("nan")]])
    got = kernel_calls.activation(name, arena.put(pre))
    want = FUNCTIONS[name](pre.double())
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-30, equal_nan=True)
    grad, _ = kernel_calls.activation_backward(name, arena.put(torch.ones_like(pre)), arena.put(pre))
    wide = pre.double().requires_grad_()
    FUNCTIONS[name](wide).sum().backward()
    assert torch.allclose(grad.double(), wide.grad, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_padding_rows_give_zeros_whatever_they_hold(monkeypatch):
    arena = Arena()
    with_engine(monkeypatch, arena)
    pre = torch.full((2, 2, 8), float("nan"))
    pre[1] = 1.0
    extra = arena.put(torch.tensor([0.5])), arena.put(torch.tensor([-1, 0], dtype=torch.int32))
    assert torch.equal(kernel_calls.activation("swiglu", arena.put(pre), *extra)[0], torch.zeros(8))
    grad, grad_weights = kernel_calls.activation_backward("swiglu", arena.put(torch.ones(2, 8)), arena.put(pre), *extra)
    assert torch.equal(grad[0], torch.zeros(2, 8)) and grad_weights.isfinite().all()


def test_unknown_activation_and_half_given_weights(monkeypatch):
    arena = Arena()
    with_engine(monkeypatch, arena)
    pre = arena.put(torch.ones(2, 8))
    with pytest.raises(KernelError, match=r"'tanh'.*know relu"):
        kernel_calls.activation("tanh", pre)
    with pytest.raises(KernelError, match="both weights and slot_of_row"):
        kernel_calls.activation("relu", pre, arena.put(torch.ones(2)))
