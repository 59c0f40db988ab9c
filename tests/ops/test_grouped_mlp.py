"""grouped_mlp against one nn.Linear pair per expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moeflow import ops
from moeflow.errors import ConfigError
from moeflow.ops import activation

FUNCTIONS = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}
COUNTS = {"uneven": [3, 0, 5, 1], "none": [0, 0, 0, 0], "all to one": [0, 9, 0, 0], "one expert": [4]}


def make_case(counts: list[int], name: str, bias: bool, d_model=4, d_ffn=6, d_out=5, dtype=torch.float64):
    torch.manual_seed(0)
    experts, halves = len(counts), (2,) if name in GATED else ()
    rows = torch.randn(sum(counts), d_model, dtype=dtype)
    w_in = torch.randn(experts, *halves, d_ffn, d_model, dtype=dtype) / 2
    w_out = torch.randn(experts, d_out, d_ffn, dtype=dtype) / 2
    b_in = torch.randn(experts, *halves, d_ffn, dtype=dtype) if bias else None
    b_out = torch.randn(experts, d_out, dtype=dtype) if bias else None
    tensors = [t if t is None else t.requires_grad_() for t in (rows, w_in, b_in, w_out, b_out)]
    return torch.tensor(counts), tensors


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def by_linears(counts: Tensor, name: str, tensors: list[Tensor | None], upstream: Tensor):
    """Output, and gradients in the order of `tensors`, of separate modules for each expert."""
    rows, w_in, b_in, w_out, b_out = (t if t is None else t.detach() for t in tensors)
    outs, grads = [], [[] for _ in tensors]
    for e, (x, up) in enumerate(zip(rows.split(counts.tolist()), upstream.split(counts.tolist()))):
        x = x.clone().requires_grad_()
        first = linear(w_in[e].flatten(0, -2), None if b_in is None else b_in[e].flatten())
        second = linear(w_out[e], None if b_out is None else b_out[e])
        hidden = first(x)
        if name in GATED:
            gate, value = hidden.chunk(2, dim=1)
            hidden = FUNCTIONS[GATED[name]](gate) * value
        else:
            hidden = FUNCTIONS[name](hidden)
        out = second(hidden)
        out.backward(up)
        outs.append(out.detach())
        for kept, tensor in zip(grads, (x, first.weight, first.bias, second.weight, second.bias)):
            kept.append(None if tensor is None else tensor.grad)
    stacked = [None if k[0] is None else torch.stack(k).view_as(t) for k, t in zip(grads[1:], tensors[1:])]
    return torch.cat(outs), [torch.cat(grads[0]), *stacked]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", activation.NAMES)
@pytest.mark.parametrize("counts", COUNTS)
def test_matches_one_linear_pair_per_expert(counts: str, name: str, bias: bool):
    counts_E, tensors = make_case(COUNTS[counts], name, bias)
    rows, w_in, b_in, w_out, b_out = tensors
    out = ops.grouped_mlp(rows, counts_E, w_in, b_in, w_out, b_out, name)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    expected, grads = by_linears(counts_E, name, tensors, upstream)
    torch.testing.assert_close(out, expected)
    for tensor, grad in zip(tensors, grads):
        if tensor is not None:
            torch.testing.assert_close(tensor.grad, grad)  # an idle expert: zeros, not a missing gradient


def test_bias_of_one_layer_only():
    counts, (rows, w_in, b_in, w_out, b_out) = make_case([2, 3], "gelu", True)
    for first, second in ((b_in, None), (None, b_out)):
        out = ops.grouped_mlp(rows, counts, w_in, first, w_out, second, "gelu")
        zero_in, zero_out = torch.zeros_like(b_in), torch.zeros_like(b_out)
        padded = ops.grouped_mlp(
            rows,
            counts,
            w_in,
            zero_in if first is None else first,
            w_out,
            zero_out if second is None else second,
            "gelu",
        )
        torch.testing.assert_close(out, padded)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_gradcheck(name: str):
    counts, tensors = make_case([2, 0, 3], name, True, d_model=3, d_ffn=2, d_out=2)

    def run(rows, w_in, b_in, w_out, b_out):
        return ops.grouped_mlp(rows, counts, w_in, b_in, w_out, b_out, name)

    assert torch.autograd.gradcheck(run, tensors)


def test_expanded_upstream_gradient():
    counts, tensors = make_case([2, 3], "relu", True)
    rows, w_in, b_in, w_out, b_out = tensors
    ops.grouped_mlp(rows, counts, w_in, b_in, w_out, b_out, "relu").sum().backward()
    _, grads = by_linears(counts, "relu", tensors, torch.ones(5, 5, dtype=torch.float64))
    torch.testing.assert_close(w_in.grad, grads[1])


@pytest.mark.parametrize("name", ["relu", "swiglu"])
def test_bf16_error_is_that_of_plain_torch(name: str):
    counts, tensors = make_case([16, 0, 40, 8], name, True, 32, 64, 32, dtype=torch.float32)
    upstream = torch.randn(64, 32)
    exact, exact_grads = by_linears(counts, name, tensors, upstream)
    half = [t if t is None else t.detach().bfloat16().requires_grad_() for t in tensors]
    plain, plain_grads = by_linears(counts, name, half, upstream.bfloat16())
    rows, w_in, b_in, w_out, b_out = half
    ours = ops.grouped_mlp(rows, counts, w_in, b_in, w_out, b_out, name)
    ours.backward(upstream.bfloat16())
    assert ours.dtype == torch.bfloat16
    for got, torch_half, truth in zip([ours, *(t.grad for t in half)], [plain, *plain_grads], [exact, *exact_grads]):
        error, allowed = (got - truth).abs().max(), (torch_half - truth).abs().max()
        assert error <= 2 * allowed + 1e-3 * truth.abs().max()


def test_autocast_computes_in_bf16_and_keeps_fp32_gradients():
    counts, tensors = make_case([4, 6], "gelu", True, 8, 16, 8, dtype=torch.float32)
    rows, w_in, b_in, w_out, b_out = tensors
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ops.grouped_mlp(rows, counts, w_in, b_in, w_out, b_out, "gelu")
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors)
    exact = ops.grouped_mlp(rows, counts, w_in, b_in, w_out, b_out, "gelu")
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05)


def test_unknown_activation_suggests():
    with pytest.raises(ConfigError, match="Did you mean 'swiglu'"):
        activation.check("swigl")


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(bias: bool):
    counts, (rows, w_in, b_in, w_out, b_out) = make_case([2, 0, 3], "swiglu", bias)
    args = (rows, counts, w_in, b_in, w_out, b_out, "swiglu")
    torch.library.opcheck(torch.ops.moeflow.grouped_mlp.default, args)
