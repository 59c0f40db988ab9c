"""Permutes of other libraries, for benchmarks/kernels.py: Triton kernels of the usual kind, and Transformer Engine's.

Legend: T tokens, D model, K top-k, R rows.

Each function returns a function without arguments that runs one kernel on tensors it holds, or raises ImportError.
"""

# ruff: noqa: F821 -- the Triton kernels find `tl` once Triton is imported
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Any]


def triton_dispatch(x_TD: Tensor, slot_of_row_R: Tensor, top_k: int) -> Run:
    """One program for each row that copies its token: the design of MegaBlocks' gather."""
    kernels = _triton()
    rows_RD = x_TD.new_empty(slot_of_row_R.shape[0], x_TD.shape[1])
    width = x_TD.shape[1]
    grid = (rows_RD.shape[0],)
    return lambda: kernels["copy"][grid](x_TD, rows_RD, slot_of_row_R, width, top_k, BLOCK=1024)


def triton_combine(rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor) -> Run:
    """One program for each token and piece of its row, that sums over the choices: the design of MinimalAsyncEP."""
    kernels = _triton()
    (num_tokens, top_k), width = row_of_TK.shape, rows_RD.shape[1]
    y_TD = rows_RD.new_empty(num_tokens, width)
    grid = (num_tokens, -(-width // 1024))
    return lambda: kernels["sum"][grid](rows_RD, y_TD, row_of_TK, weights_TK, width, K=top_k, BLOCK=1024)


def engine_dispatch(x_TD: Tensor, ids_TK: Tensor) -> Run:
    """Transformer Engine's permute by indices."""
    from transformer_engine.pytorch import moe_permute

    ids = ids_TK.to(torch.int32)
    return lambda: moe_permute(x_TD, ids, ids.numel(), map_type="index")


def engine_combine(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Run:
    """Transformer Engine's un-permute by indices, weighted."""
    from transformer_engine.pytorch import moe_permute, moe_unpermute

    ids = ids_TK.to(torch.int32)
    rows_RD, order = moe_permute(x_TD, ids, ids.numel(), map_type="index")
    return lambda: moe_unpermute(rows_RD, order, weights_TK, map_type="index")


_kernels: dict[str, Any] = {}


def _triton() -> dict[str, Any]:
    if not _kernels:
        import triton
        import triton.language as tl

        # The compiled functions look names up among this module's.
        globals()["tl"] = tl
        _kernels.update(copy=triton.jit(_copy_row), sum=triton.jit(_sum_rows))
    return _kernels


def _copy_row(x, rows, slot_of_row, width, top_k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = (tl.load(slot_of_row + row) // top_k).to(tl.int64)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + token * width + at, mask=at < width)
        tl.store(rows + row * width + at, value, mask=at < width)


def _sum_rows(rows, y, row_of, weights, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(K):
        row = tl.load(row_of + token * K + k).to(tl.int64)
        weight = tl.load(weights + token * K + k)
        value = tl.load(rows + row * width + at, mask=at < tl.where(row >= 0, width, 0), other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(y + token * width + at, total.to(y.dtype.element_ty), mask=at < width)
