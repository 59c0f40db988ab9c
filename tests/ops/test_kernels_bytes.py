"""Bytes that the kernels move, counted while their sources run on the host: docs/kernels.md states them."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from moeflow.ops import kernel_calls
from tests.cuda_host import fake_cupy
from tests.cuda_host.fake_cupy import with_engine
from tests.cuda_host.memory import Arena
from tests.distributed import ROOT
from tests.ops.test_kernels_permute import random_plan

COUNTER = 'extern "C" { __attribute__((visibility("default"))) unsigned long long moeflow_bytes; }\n'
LOAD = "static __device__ __forceinline__ Raw load(const T* from) {"
STORE = "static __device__ __forceinline__ void store(T* to, Raw raw) {"
T, D, F, E = 6, 1024, 512, 64


def counting(code: str) -> str:
    """The source with every access to rows counted."""
    assert LOAD in code and STORE in code
    for access in (LOAD, STORE):
        code = code.replace(access, f"{access} moeflow_bytes += sizeof(Raw);")
    return COUNTER + code


def count(run, launch) -> int:
    """Bytes of all accesses to rows in `launch()`."""
    launch()  # builds
    counters = [
        ctypes.c_ulonglong.in_dll(module._library, "moeflow_bytes")
        for (code, *_), module in fake_cupy._built.items()
        if code.startswith(COUNTER)
    ]
    for counter in counters:
        counter.value = 0
    launch()
    return sum(counter.value for counter in counters)


@pytest.fixture
def run(monkeypatch):
    return with_engine(monkeypatch, Arena(), edit=counting, seeds=(0,), strict=False)


@pytest.mark.parametrize("k", [2, 8])
def test_rows(run, k):
    row_of, slots = random_plan(T, k, 0.0, 0, seed=0)
    x, grad = torch.randn(2, T, D).to(torch.bfloat16)
    rows, weights = torch.randn(T * k, D).to(torch.bfloat16), torch.rand(T, k)
    got = {
        "dispatch (forward)": count(run, lambda: kernel_calls.dispatch(x, row_of, slots)),
        "combine (forward)": count(run, lambda: kernel_calls.combine(rows, row_of, weights)),
        "combine (backward, both gradients)": count(
            run, lambda: kernel_calls.combine_backward(grad, rows, weights, row_of, slots)
        ),
        "dispatch (backward)": count(run, lambda: kernel_calls.combine(rows, row_of, None)),
    }
    floor = dict(zip(got, (1 + k, k + 1, 1 + 2 * k, k + 1), strict=True))
    text = (ROOT / "docs" / "kernels.md").read_text()
    for name, moved in got.items():
        units = moved / (T * D * 2)
        stated = re.search(rf"^\| {re.escape(name)} \|[^|]*\|(.*)\|$", text, re.MULTILINE)[1].split("|")
        by_k = {2: (stated[0], stated[2]), 8: (stated[1], stated[3])}[k]
        assert [float(cell.replace("u", "")) for cell in by_k] == [units, floor[name]], name
        # Maps and weights, each read once, beside the rows.
        assert (units + 12 * k / (D * 2)) / floor[name] <= 1.15, name


@pytest.mark.parametrize(("name", "forward", "backward"), [("gelu", 2, 3), ("swiglu", 3, 5)])
def test_hidden_layer(run, name, forward, backward):
    pre = torch.randn(T, *([2] if name == "swiglu" else []), F).to(torch.bfloat16)
    grad = torch.randn(T, F).to(torch.bfloat16)
    unit = T * F * 2
    assert count(run, lambda: kernel_calls.activation(name, pre)) == forward * unit
    assert count(run, lambda: kernel_calls.activation_backward(name, grad, pre)) == backward * unit


def test_gate(run):
    logits = torch.randn(T, E)
    made = kernel_calls.gate_topk(logits, 2)
    assert count(run, lambda: kernel_calls.gate_topk(logits, 2)) == T * 2 * E * 4
    grads = torch.randn(T, E), torch.randn(T, 2)
    for grad_scores, moved in ((None, 2), (grads[0], 3)):
        got = count(
            run, lambda g=grad_scores: kernel_calls.gate_topk_backward(g, grads[1], *made[:3], "softmax", False)
        )
        assert got == T * moved * E * 4
