"""Experts by torch's grouped kernel, and layer by layer: the same as one expert at a time; and which way is chosen."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from moeflow import ops
from moeflow.ops import backend, grouped_gemm
from tests.cuda_host.fake_cupy import ops_on_kernels

grouped_mlp = importlib.import_module("moeflow.ops.grouped_mlp")  # the function of that name hides the module

# torch's grouped kernel runs on CPUs too (from 2.9 on where sizes are multiples of 16 bytes).
COUNTS = {"uneven": [3, 0, 13, 1], "all to one": [0, 17, 0, 0], "idle at both ends": [0, 8, 9, 0]}


@pytest.fixture(params=["loop", "grouped_mm"])
def layers(request, monkeypatch):
    """Experts as on a CUDA device, layer by layer; with the products in one of the two ways."""

    def turn_on():
        monkeypatch.setattr(grouped_mlp, "_one_expert_at_a_time", lambda rows: False)
        monkeypatch.setattr(grouped_gemm, "use_grouped", lambda *operands: request.param == "grouped_mm")

    return turn_on


def case(counts, activation, bias, dtype=torch.float32, d_model=16, d_ffn=24, d_out=8):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator).div(2).to(dtype).requires_grad_()

    experts, halves = len(counts), (2,) if activation in ("swiglu", "geglu", "reglu") else ()
    biases = (draw(experts, *halves, d_ffn), draw(experts, d_out)) if bias else (None, None)
    rows, w_in, w_out = draw(sum(counts), d_model), draw(experts, *halves, d_ffn, d_model), draw(experts, d_out, d_ffn)
    return rows, torch.tensor(counts), w_in, biases[0], w_out, biases[1], activation


def _is_float(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def run(arguments):
    """Output and gradients of grouped_mlp."""
    wanted = [each for each in arguments if isinstance(each, torch.Tensor) and each.requires_grad]
    out = ops.grouped_mlp(*arguments)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, wanted, upstream)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("counts", COUNTS)
def test_mlp_equals_one_expert_at_a_time(counts, activation, bias, layers):
    arguments = case(COUNTS[counts], activation, bias)
    plain = run(arguments)
    layers()
    for got, want in zip(run(arguments), plain, strict=True):
        assert got.is_contiguous() and got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_mlp_in_bf16(layers):
    arguments = case(COUNTS["uneven"], "swiglu", True, torch.bfloat16)
    exact = run([each.detach().float().requires_grad_() if _is_float(each) else each for each in arguments])
    layers()
    for got, want in zip(run(arguments), exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - want).norm() < 1e-2 * want.norm()


def test_no_rows_at_all(monkeypatch):
    monkeypatch.setattr(grouped_mlp, "_one_expert_at_a_time", lambda rows: False)
    out, *grads = run(case([0, 0], "gelu", True))
    assert out.shape == (0, 8) and all(not grad.any() for grad in grads)


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias, layers):
    rows, counts, weight, b_in, *_ = case(COUNTS["uneven"], "gelu", bias)
    arguments = (rows, counts, weight, b_in)
    outs = []
    for way in (lambda: None, layers):
        way()
        out = ops.grouped_linear(*arguments)
        grads = torch.autograd.grad(out.square().sum(), [each for each in (rows, weight, b_in) if each is not None])
        outs.append([out, *grads])
    lo = 0
    for expert, count in enumerate(counts.tolist()):
        want = torch.nn.functional.linear(rows[lo : lo + count], weight[expert], b_in[expert] if bias else None)
        torch.testing.assert_close(outs[0][0][lo : lo + count], want)
        lo += count
    for got, want in zip(outs[1], outs[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "geglu"])
def test_activations_run_on_the_kernels(activation, monkeypatch):
    arguments = case(COUNTS["uneven"], activation, True)
    plain = run(arguments)
    monkeypatch.setattr(grouped_mlp, "_one_expert_at_a_time", lambda rows: False)
    kernels = ops_on_kernels(monkeypatch)
    for got, want in zip(run(arguments), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert {name.partition("<")[0] for name in kernels.cupy.launches} == {
        "moeflow::activation_forward",
        "moeflow::activation_backward",
    }


def test_idle_experts_are_zeroed_where_the_kernel_leaves_them(monkeypatch):
    def leaves_rubbish(a, b, offs):
        out = torch.full((len(offs), a.shape[0], b.shape[1]), float("nan"))
        for e, (lo, hi) in enumerate(zip([0, *offs.tolist()], offs.tolist())):
            if hi > lo:
                out[e] = a[:, lo:hi] @ b[lo:hi]
        return out

    monkeypatch.setattr(grouped_gemm, "_grouped_mm", leaves_rubbish)
    grad, rows, counts = torch.randn(9, 8), torch.randn(9, 16), torch.tensor([0, 4, 0, 5])
    of = grouped_gemm.groups(counts, 9, grouped=True)
    want = torch.stack([g.t() @ r for g, r in zip(grad.split(counts.tolist()), rows.split(counts.tolist()))])
    torch.testing.assert_close(grouped_gemm.grad_weight(grad, rows, of), want)
    torch.testing.assert_close(
        grouped_gemm.grad_bias(grad, of), torch.stack([g.sum(0) for g in grad.split([0, 4, 0, 5])])
    )


@pytest.mark.parametrize(
    ("capability", "name", "implementation", "reason"),
    [
        ((9, 0), "torch.nn.functional.grouped_mm", "grouped_mm", "grouped_mm in bf16 where sizes are multiples of 8"),
        ((10, 0), "torch._grouped_mm", "grouped_mm", r"torch\._grouped_mm in bf16"),
        ((8, 0), "torch.nn.functional.grouped_mm", "loop", "no kernel for compute capability 8.0"),
        ((9, 0), None, "loop", "has no grouped_mm"),
    ],
)
def test_choice_and_its_reason(capability, name, implementation, reason, monkeypatch):
    monkeypatch.setattr(backend, "_exists", lambda each: each == name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    backend.choose.cache_clear()
    try:
        chosen, why = backend.choose("grouped_mlp", "cuda")
        assert chosen == implementation and re.search(reason, why)
    finally:
        backend.choose.cache_clear()


def test_what_the_grouped_kernel_takes():
    def aligned(*shape):
        return grouped_gemm.is_aligned(torch.zeros(shape, dtype=torch.bfloat16), 2)

    assert aligned(3, 16, 24)
    assert not aligned(3, 16, 12) and not aligned(3, 12, 16)
    assert not grouped_gemm.is_aligned(torch.zeros(65, dtype=torch.bfloat16)[1:].view(4, 16), 1)
    assert grouped_gemm.is_aligned(torch.zeros(3, 16, dtype=torch.bfloat16), 1)  # any number of rows
    assert not grouped_gemm.use_grouped(torch.zeros(8, 16, dtype=torch.bfloat16))  # not on a CUDA device
