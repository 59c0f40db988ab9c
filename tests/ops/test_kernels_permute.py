"""dispatch, combine and both gradients: the CUDA sources, run on the host, against a loop in fp64."""

from __future__ import annotations

import pytest
import torch

from moeflow.ops import kernel_calls
from moeflow.ops._cupy import KernelError
from tests.cuda_host.fake_cupy import bits, with_engine
from tests.cuda_host.memory import Arena

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
DTYPES = list(TOLERANCE)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in fp64; infinite where a value is not finite."""
    got, want = got.detach().double(), want.detach().double()
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def random_plan(num_tokens: int, top_k: int, drop: float, padding: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A random bijection of the kept choices onto rows, with `padding` rows that no choice has."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.arange(num_tokens * top_k)[torch.rand(num_tokens * top_k, generator=generator) >= drop]
    num_rows = len(slots) + padding
    rows = torch.randperm(num_rows, generator=generator)[: len(slots)]
    row_of = torch.full((num_tokens * top_k,), -1, dtype=torch.int32)
    slot_of_row = torch.full((num_rows,), -1, dtype=torch.int32)
    row_of[slots] = rows.int()
    slot_of_row[rows] = slots.int()
    return row_of.view(num_tokens, top_k), slot_of_row


def slow_dispatch(x: torch.Tensor, row_of: torch.Tensor, num_rows: int) -> torch.Tensor:
    rows = torch.zeros(num_rows, x.shape[1], dtype=x.dtype)
    for token, choices in enumerate(row_of.tolist()):
        for row in choices:
            if row >= 0:
                rows[row] = x[token]
    return rows


def slow_combine(rows: torch.Tensor, row_of: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    y = torch.zeros(row_of.shape[0], rows.shape[1], dtype=torch.float64)
    for token, choices in enumerate(row_of.tolist()):
        for k, row in enumerate(choices):
            if row >= 0:
                y[token] += rows[row].double() * (1.0 if weights is None else weights[token, k].double())
    return y


# (T, K, D, share dropped, padding rows, pointer offset in bytes)
SHAPES = [
    (0, 2, 16, 0.0, 0, 0),
    (1, 1, 1, 0.0, 0, 0),
    (1, 2, 8, 0.0, 3, 0),
    (5, 2, 64, 0.0, 0, 0),
    (37, 2, 24, 0.3, 5, 0),
    (9, 3, 20, 0.2, 2, 0),
    (7, 4, 7, 0.0, 1, 0),
    (6, 5, 33, 0.4, 0, 0),
    (5, 6, 48, 0.2, 0, 4),
    (4, 7, 10, 0.2, 0, 0),
    (6, 8, 2056, 0.2, 2, 0),
    (3, 8, 264, 1.0, 2, 0),
    (3, 10, 136, 0.1, 1, 8),
    (33, 2, 40, 0.1, 0, 2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "T{}-K{}-D{}-drop{}-pad{}-off{}".format(*s))
def test_permute(shape, dtype, monkeypatch):
    num_tokens, top_k, width, drop, padding, offset = shape
    arena = Arena(side="start" if num_tokens % 2 else "end", offset=offset)
    with_engine(monkeypatch, arena)
    row_of, slot_of_row = random_plan(num_tokens, top_k, drop, padding, seed=num_tokens + top_k)
    num_rows = len(slot_of_row)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, width, generator=generator).to(dtype)
    rows = torch.randn(num_rows, width, generator=generator).to(dtype)
    # Rows of padding hold NaN: nothing may read them.
    rows[slot_of_row < 0] = float("nan")
    weights = torch.rand(num_tokens, top_k, generator=generator)
    grad = torch.randn(num_tokens, width, generator=generator).to(dtype)

    row_of_g, slots_g = (
        arena.put(row_of, "row_of"),
        arena.put(slot_of_row, "slot_of_row"),
    )
    x_g, rows_g, grad_g = (
        arena.put(x, "x"),
        arena.put(rows, "rows"),
        arena.put(grad, "grad"),
    )
    weights_g = arena.put(weights, "weights")

    got = kernel_calls.dispatch(x_g, row_of_g, slots_g, padded=padding > 0)
    assert torch.equal(bits(got), bits(slow_dispatch(x, row_of, num_rows)))

    for chosen in (None, weights_g):
        got = kernel_calls.combine(rows_g, row_of_g, chosen)
        want = slow_combine(rows, row_of, None if chosen is None else weights)
        assert got.dtype == dtype
        assert relative_error(got, want) < TOLERANCE[dtype]

    grad_rows, grad_weights = kernel_calls.combine_backward(
        grad_g, rows_g, weights_g, row_of_g, slots_g, padded=padding > 0
    )
    want_rows = torch.zeros(num_rows, width, dtype=torch.float64)
    want_weights = torch.zeros(num_tokens, top_k, dtype=torch.float64)
    for token, choices in enumerate(row_of.tolist()):
        for k, row in enumerate(choices):
            if row >= 0:
                want_rows[row] = grad[token].double() * weights[token, k].double()
                want_weights[token, k] = (grad[token].double() * rows[row].double()).sum()
    assert relative_error(grad_rows, want_rows) < TOLERANCE[dtype]
    # A short dot product may cancel: its error is judged against the size of its terms.
    assert (grad_weights - want_weights).abs().max() <= TOLERANCE[dtype] * width**0.5 if num_tokens else True


def test_wide_rows_use_sixteen_bytes(monkeypatch):
    arena = Arena()
    run = with_engine(monkeypatch, arena)
    row_of, slots = random_plan(3, 2, 0.0, 0, seed=0)
    for width, dtype, moved in (
        (64, torch.bfloat16, 8),
        (20, torch.bfloat16, 4),
        (7, torch.float32, 1),
    ):
        x = arena.put(torch.randn(3, width).to(dtype))
        kernel_calls.dispatch(x, arena.put(row_of), arena.put(slots))
        assert f", {moved}, 2>" in run.cupy.launches[-1]


def test_unfit_tensors_are_refused(monkeypatch):
    arena = Arena()
    with_engine(monkeypatch, arena)
    row_of, slots = (arena.put(each) for each in random_plan(4, 2, 0.0, 0, seed=0))
    x = arena.put(torch.randn(4, 8))
    with pytest.raises(KernelError, match="not contiguous"):
        kernel_calls.dispatch(x.t().contiguous().t(), row_of, slots)
    with pytest.raises(KernelError, match="float64: the kernel takes float32"):
        kernel_calls.dispatch(x.double(), row_of, slots)
    with pytest.raises(KernelError, match="row_of has shape"):
        kernel_calls.dispatch(x, row_of[:2], slots)
    with pytest.raises(KernelError, match="int64: the kernel takes int32"):
        kernel_calls.combine(x, row_of.long(), None)
    with pytest.raises(KernelError, match="on meta"):
        kernel_calls.combine(x.to("meta"), row_of, None)
