"""The operators of `moeflow.ops` on top of the kernels: the same results, gradients and whole layers as plain torch."""

from __future__ import annotations

import pytest
import torch

from moeflow import ops
from moeflow.moe import MoELayer
from moeflow.ops import _cupy, backend
from moeflow.ops.plan import make_padded_plan
from tests.cuda_host.fake_cupy import ops_on_kernels


def both(monkeypatch, compute):
    """Results of `compute()` as plain torch, and on the kernels; and the kernels launched."""
    plain = compute()
    run = ops_on_kernels(monkeypatch)
    on_kernels = compute()
    assert run.cupy.launches, "no kernel was launched"
    return plain, on_kernels, run.cupy.launches


def assert_same(plain, on_kernels, tolerance: float = 0.0):
    assert len(plain) == len(on_kernels)
    for a, b in zip(plain, on_kernels, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_plans_and_capacity(dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 6, (50, 3), generator=generator).to(dtype)
    priority = torch.rand(50, 3, generator=generator)

    def compute():
        kept = ops.limit_by_capacity(ids, 6, 11)
        highest = ops.limit_by_capacity(ids, 6, 11, "probability", priority)
        plan, fixed = ops.make_plan(kept, 6), make_padded_plan(kept, 6, 11)
        sure = ops.make_plan(ids.clamp(min=0), 6, may_drop=False)
        maps = [each for one in (plan, fixed, sure) for each in (one.row_of_TK, one.slot_of_row_R)]
        return [kept, highest, plan.tokens_per_expert_E, sure.tokens_per_expert_E, *maps, ops.histogram(ids, 6)]

    plain, on_kernels, launches = both(monkeypatch, compute)
    assert_same(plain, on_kernels)
    assert "moeflow::keep_highest" in launches


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dispatch_and_combine_with_gradients(dtype, padded, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    x0 = torch.randn(20, 24, generator=generator).to(dtype)
    scores0 = torch.rand(20, 5, generator=generator)
    target = torch.randn(20, 24, generator=generator)

    def compute():
        x, scores = x0.clone().requires_grad_(), scores0.clone().requires_grad_()
        weights, ids = ops.top_k(scores, 2)
        ids = ops.limit_by_capacity(ids, 5, 7)
        plan = make_padded_plan(ids, 5, 7) if padded else ops.make_plan(ids, 5)
        rows = ops.dispatch(x, plan)
        y = ops.combine(rows * 1.5, plan, weights) + ops.combine(rows, plan)
        (y.float() * target).sum().backward()
        return [y, x.grad, scores.grad]

    plain, on_kernels, launches = both(monkeypatch, compute)
    assert_same(plain, on_kernels, 1e-5 if dtype == torch.float32 else 4e-2)
    assert any("combine_rows_backward" in name for name in launches)


def test_regroup_with_its_gradient(monkeypatch):
    generator = torch.Generator().manual_seed(4)
    counts = torch.tensor([[1, 0, 3], [2, 2, 0]])
    rows0, target = torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)

    def compute():
        rows = rows0.clone().requires_grad_()
        out = ops.regroup(rows, counts)
        (out * target).sum().backward()
        return [out, rows.grad, ops.regroup(out, counts, inverse=True)]

    plain, on_kernels, launches = both(monkeypatch, compute)
    assert_same(plain, on_kernels)
    assert len(launches) == 3


def test_a_whole_layer(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    torch.manual_seed(0)
    layer = MoELayer(d_model=16, num_experts=4, d_hidden=24, activation="swiglu")
    x0 = torch.randn(30, 16, generator=generator)

    def compute():
        layer.zero_grad()
        x = x0.clone().requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        return [y, x.grad, *(parameter.grad for parameter in layer.parameters())]

    plain, on_kernels, _ = both(monkeypatch, compute)
    assert_same(plain, on_kernels, 1e-4)


def test_compiled_operators_keep_their_kernels(monkeypatch):
    run = ops_on_kernels(monkeypatch)
    x = torch.randn(12, 8)
    ids = torch.randint(0, 3, (12, 2))

    def compute(x, ids):
        plan = ops.make_plan(ids, 3, may_drop=False)
        return ops.combine(ops.dispatch(x, plan), plan)

    got = torch.compile(compute, backend="aot_eager", fullgraph=True)(x, ids)
    torch.testing.assert_close(got, 2 * x)
    assert any("dispatch_rows" in name for name in run.cupy.launches)


def test_under_autocast_the_kernels_keep_the_dtype(monkeypatch):
    run = ops_on_kernels(monkeypatch)
    x = torch.randn(6, 8, dtype=torch.bfloat16)
    plan = ops.make_plan(torch.zeros(6, 1, dtype=torch.int64), 1, may_drop=False)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.combine(ops.dispatch(x, plan), plan, torch.ones(6, 1))
    assert y.dtype == torch.bfloat16 and torch.equal(y, x)
    assert "moeflow::combine_rows<moeflow::bf16, 8, 1>" in run.cupy.launches


def test_dtypes_and_sizes_that_the_kernels_lack_run_as_plain_torch(monkeypatch):
    run = ops_on_kernels(monkeypatch)
    _, ids = ops.top_k(torch.randn(3, 600, generator=torch.Generator().manual_seed(0)), 2)
    assert ids.shape == (3, 2)
    plan = ops.make_plan(torch.zeros(3, 1, dtype=torch.int64), 2000)
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(ops.combine(ops.dispatch(x, plan), plan), x)
    assert not run.cupy.launches


def test_choice_and_its_reason(monkeypatch, caplog):
    monkeypatch.setattr(_cupy, "unavailable", lambda: "no CuPy; pip install cupy-cuda12x")
    backend.choose.cache_clear()
    backend._warn.cache_clear()
    try:
        with caplog.at_level("WARNING", logger="moeflow"):
            assert backend.choose("dispatch", "cuda") == ("torch", "no CuPy; pip install cupy-cuda12x")
            assert backend.choose("combine", "cuda")[0] == "torch"
        assert len(caplog.records) == 1 and "pip install cupy-cuda12x" in caplog.text
        monkeypatch.setenv("MOEFLOW_OPS", "cupy")
        backend.choose.cache_clear()
        with pytest.raises(_cupy.MoeflowError, match=r"ops\.backend=cupy: no CuPy"):
            backend.choose("dispatch", "cuda")
        monkeypatch.setattr(_cupy, "unavailable", lambda: None)
        assert backend.choose("dispatch", "cuda") == ("cupy", "asked for")
        monkeypatch.setenv("MOEFLOW_OPS", "torch")
        backend.choose.cache_clear()
        assert backend.choose("dispatch", "cuda") == ("torch", "asked for")
    finally:
        backend.choose.cache_clear()


def test_no_driver_is_a_reason_and_not_a_crash():
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    reason = _cupy.unavailable()
    assert reason and ("pip install" in reason or "no CUDA device" in reason)
    with pytest.raises(_cupy.KernelError, match="cannot run"):
        _cupy.engine()
