"""Collectives of the MoE layer and the trainer; the only module that calls torch.distributed's.

Legend: R rows, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeflow.parallel.topology import Group


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce in place over the group ("sum", "max" or "min"), and return the tensor.  No gradient."""
    if group.size > 1:
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), group=group.process_group)
    return tensor


def barrier(group: Group) -> None:
    """Wait for every rank of the group."""
    if group.size > 1:
        dist.barrier(group=group.process_group)


def broadcast_object(value: Any, group: Group, source: int = 0) -> Any:
    """Send a small picklable value of one group rank to all."""
    if group.size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=group.ranks[source], group=group.process_group)
    return box[0]


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Small picklable values of all ranks, in group order, on every rank."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def batch_mean(local_mean: Tensor, group: Group) -> Tensor:
    """Mean over the ranks in value, the own term alone in gradient.

    The mean over ranks of the gradients of a loss f(batch_mean(m)) is then the gradient of f of the whole batch's mean.
    """
    if group.size == 1:
        return local_mean
    own = local_mean.detach()
    mean = all_reduce(own.clone(), group) / group.size
    return local_mean + (mean - own)


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """All-to-all of an equal number of entries per rank: int64 [size, L] -> [size, L]."""
    if group.size == 1:
        return counts
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group.process_group)
    return received


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows_RD, send, receive, group)

    @staticmethod
    def backward(ctx, grad_RD: Tensor):
        return _all_to_all(grad_RD, ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(rows_RD: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    out_RD = rows_RD.new_empty(sum(receive), *rows_RD.shape[1:])
    dist.all_to_all_single(out_RD, rows_RD.contiguous(), list(receive), list(send), group=group.process_group)
    return out_RD


def all_to_all_rows(rows_RD: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Send `send[i]` rows, in order, to group rank i and receive `receive[i]` from it; differentiable.

    Args:
        rows_RD: [sum(send), D].
        send: rows for each group rank.
        receive: rows from each group rank.

    Returns:
        [sum(receive), D], ordered by source.
    """
    if group.size == 1:
        return rows_RD
    return _AllToAllRows.apply(rows_RD, send, receive, group)
