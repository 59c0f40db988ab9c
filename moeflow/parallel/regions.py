"""Tensor parallelism's communication at the borders of a region, with autograd.

Inside a region (attention, a dense MLP) each tp rank computes with its columns of the first matrices and its rows of
the last.  Outside, activations are the same on every tp rank, or, with sequence parallelism, cut along the sequence
(Megatron-LM, arXiv:1909.08053 section 3 and arXiv:2205.05198 section 4).

    enter    identity          backward: sum over tp          sequence parallel: all-gather / reduce-scatter
    leave    sum over tp       backward: identity             sequence parallel: reduce-scatter / all-gather

Legend: S sequence (the dimension that is cut: the last but one), D model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeflow.ops.phases import in_phase
from moeflow.parallel import collectives
from moeflow.parallel.topology import Group


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return collectives.all_reduce(grad.contiguous().clone(), ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return collectives.all_reduce(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _reduce_scatter(grad, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather(grad, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.length = group, x.shape[-2]
        return _part(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather_uneven(grad, ctx.length, ctx.group), None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int, group: Group) -> Tensor:
        ctx.group = group
        return _gather_uneven(x, length, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _part(grad, ctx.group), None, None


@in_phase("tensor parallel")
def enter(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """Bring x [..., S, D] into a region."""
    return (_GatherSequence if sequence_parallel else _Enter).apply(x, group)


@in_phase("tensor parallel")
def leave(x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
    """Bring each rank's part of the sum x [..., S, D] out of a region."""
    return (_ScatterSequence if sequence_parallel else _Leave).apply(x, group)


@in_phase("tensor parallel")
def split_tokens(x: Tensor, group: Group) -> Tensor:
    """This rank's part, along the last but one dimension, of a tensor that all ranks hold alike."""
    return _Split.apply(x, group)


@in_phase("tensor parallel")
def merge_tokens(x: Tensor, length: int, group: Group) -> Tensor:
    """All ranks' parts, on every rank; `length` is the whole size of the last but one dimension."""
    return _Merge.apply(x, length, group)


def part_bounds(length: int, group: Group, rank: int | None = None) -> tuple[int, int]:
    """First and last + 1 index of a rank's part, as torch.chunk cuts: the last parts may be shorter or empty."""
    size = -(-length // group.size)
    rank = group.rank if rank is None else rank
    return min(rank * size, length), min((rank + 1) * size, length)


def _part(x: Tensor, group: Group) -> Tensor:
    lo, hi = part_bounds(x.shape[-2], group)
    return x[..., lo:hi, :].contiguous()


def _gather(x: Tensor, group: Group) -> Tensor:
    return torch.cat(collectives.all_gather(x.contiguous(), group), dim=-2)


def _gather_uneven(x: Tensor, length: int, group: Group) -> Tensor:
    # Collectives want equal sizes, so short parts are filled up and cut again.
    size = -(-length // group.size)
    missing = size - x.shape[-2]
    padded = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
    parts = collectives.all_gather(padded.contiguous(), group)
    bounds = [part_bounds(length, group, rank) for rank in range(group.size)]
    return torch.cat([part[..., : hi - lo, :] for part, (lo, hi) in zip(parts, bounds, strict=True)], dim=-2)


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    parts = torch.stack(x.chunk(group.size, dim=-2))
    return collectives.reduce_scatter(parts, group)
