"""Collectives of the MoE layer and the trainer; the only module that calls torch.distributed's.

Legend: R rows, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moeflow.errors import CollectiveError
from moeflow.parallel.topology import Group
from moeflow.parallel.watch import watched


def all_reduce(tensor: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce in place over the group ("sum", "max" or "min"), and return the tensor.  No gradient."""
    if group.size > 1:
        with watched("all-reduce", group, tensor.shape):
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()), group=group.process_group)
    return tensor


def broadcast(tensor: Tensor, group: Group, source: int = 0) -> Tensor:
    """Overwrite the tensor by that of a group rank, in place, and return it.  No gradient."""
    if group.size > 1:
        with watched("broadcast", group, tensor.shape):
            dist.broadcast(tensor, src=group.ranks[source], group=group.process_group)
    return tensor


def barrier(group: Group, name: str = "barrier") -> None:
    """Wait for every rank of the group; `name` is what a message calls it."""
    if group.size > 1:
        with watched(name, group):
            dist.barrier(group=group.process_group)


def broadcast_object(value: Any, group: Group, source: int = 0) -> Any:
    """Send a small picklable value of one group rank to all."""
    if group.size == 1:
        return value
    box = [value]
    with watched("broadcast", group):
        dist.broadcast_object_list(box, src=group.ranks[source], group=group.process_group)
    return box[0]


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Small picklable values of all ranks, in group order, on every rank."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    with watched("gathering of objects", group):
        dist.all_gather_object(values, value, group=group.process_group)
    return values


def agree(what: str, value: Any, group: Group) -> None:
    """Make sure that all ranks of a group hold the same value.

    Args:
        what: names the value in the message.
        value: small and picklable.

    Raises:
        CollectiveError: on every rank, with each rank's value.
    """
    values = gather_objects(value, group)
    if any(other != value for other in values):
        told = ", ".join(f"rank {rank}: {other}" for rank, other in zip(group.ranks, values, strict=True))
        raise CollectiveError(
            f"the ranks of the {group.name} group disagree on {what}: {told}",
            "start all ranks with the same configuration and code",
        )


def all_gather(tensor: Tensor, group: Group) -> list[Tensor]:
    """Tensors of one shape from all ranks, in group order.  No gradient."""
    if group.size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size)]
    with watched("all-gather", group, tensor.shape):
        dist.all_gather(parts, tensor, group=group.process_group)
    return parts


def reduce_scatter(parts: Tensor, group: Group) -> Tensor:
    """Sum over the ranks of the part that belongs to this rank.  No gradient.

    Args:
        parts: [group size, ...]: entry i is what this rank adds for group rank i.

    Returns:
        [...]; summed in rank order, so the result is the same on every run.
    """
    if group.size == 1:
        return parts[0]
    received = torch.empty_like(parts)
    with watched("reduce-scatter", group, parts.shape):
        dist.all_to_all_single(received, parts.contiguous(), group=group.process_group)
    return received.sum(0)


def send(tensor: Tensor, target: int, group: Group) -> None:
    """Send a tensor to a group rank and wait."""
    with watched("send between stages", group, tensor.shape):
        dist.send(tensor, dst=group.ranks[target], group=group.process_group)


def receive(tensor: Tensor, source: int, group: Group) -> Tensor:
    """Fill `tensor` with what a group rank sends, and return it."""
    with watched("receive between stages", group, tensor.shape):
        dist.recv(tensor, src=group.ranks[source], group=group.process_group)
    return tensor


class Pending:
    """Transfers under way; keeps their memory until they are awaited."""

    def __init__(self, works: list[dist.Work], tensors: list[Tensor], group: Group, shape: tuple[int, ...]):
        self._works, self._tensors, self._group, self._shape = works, tensors, group, shape

    def wait(self) -> None:
        """Until all have come; on a GPU, later work of the current stream waits in place of the host."""
        with watched("exchange of rows in chunks", self._group, self._shape):
            for work in self._works:
                work.wait()
        self._works, self._tensors = [], []


def start(outgoing: dict[int, Tensor], incoming: dict[int, Tensor], group: Group, tag: int) -> Pending:
    """Start to send and receive tensors, and go on.

    Args:
        outgoing: group rank -> contiguous tensor; must not change before the end.
        incoming: group rank -> contiguous tensor to fill.  Empty tensors are left out, on both sides.
        group: of the ranks.
        tag: keeps apart what is under way at once; starts of one tag are met in order.
    """
    process_group = group.process_group
    sends = [(tensor, group.ranks[rank]) for rank, tensor in outgoing.items() if tensor.numel()]
    receives = [(tensor, group.ranks[rank]) for rank, tensor in incoming.items() if tensor.numel()]
    tensors = [tensor for tensor, _ in (*sends, *receives)]
    shape = tuple(tensors[0].shape) if tensors else ()
    works: list[dist.Work] = []
    with watched("start of an exchange in chunks", group, shape):
        if tensors and tensors[0].device.type == "cuda":
            # One launch for all of them, on NCCL's own stream.
            ops = [dist.P2POp(dist.isend, tensor, rank, process_group) for tensor, rank in sends]
            ops += [dist.P2POp(dist.irecv, tensor, rank, process_group) for tensor, rank in receives]
            works = list(dist.batch_isend_irecv(ops))
        else:
            started = [dist.irecv(tensor, rank, process_group, tag) for tensor, rank in receives]
            started += [dist.isend(tensor, rank, process_group, tag) for tensor, rank in sends]
            works = [work for work in started if work is not None]
    return Pending(works, tensors, group, shape)


def batch_mean(local_mean: Tensor, group: Group) -> Tensor:
    """Mean over the ranks in value, the own term alone in gradient.

    The mean over ranks of the gradients of a loss f(batch_mean(m)) is then the gradient of f of the whole batch's mean.
    """
    if group.size == 1:
        return local_mean
    own = local_mean.detach()
    mean = all_reduce(own.clone(), group) / group.size
    # Without a gradient the mean itself, which is bitwise the same on every rank: gates decide by it.
    return local_mean + (mean - own) if local_mean.requires_grad else mean


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """All-to-all of an equal number of entries per rank: int64 [size, L] -> [size, L]."""
    if group.size == 1:
        return counts
    received = torch.empty_like(counts)
    with watched("exchange of counts", group, counts.shape):
        dist.all_to_all_single(received, counts.contiguous(), group=group.process_group)
    return received


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows_RD, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        return _all_to_all(grad_RD, ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(rows_RD: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    out_RD = rows_RD.new_empty(sum(receive), *rows_RD.shape[1:])
    with watched("all-to-all of rows", group, rows_RD.shape):
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


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _spread(rows_RD, counts, group)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        return _collect(grad_RD, ctx.counts, ctx.group), None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _collect(rows_RD, counts, group)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        return _spread(grad_RD, ctx.counts, ctx.group), None, None


def _spread(rows_RD: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """All ranks' rows, ordered by rank."""
    copies = rows_RD.repeat(group.size, *[1] * (rows_RD.ndim - 1))
    return _all_to_all(copies, [rows_RD.shape[0]] * group.size, counts, group)


def _collect(rows_RD: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """Sum, over the ranks and in rank order, of the rows that belong to this rank."""
    own = counts[group.rank]
    parts = _all_to_all(rows_RD, counts, [own] * group.size, group)
    return parts.view(group.size, own, *rows_RD.shape[1:]).sum(0)


def gather_rows(rows_RD: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """All ranks' rows on every rank, ordered by rank; the gradient is summed back to the owner.

    Args:
        rows_RD: [counts[own rank], D].
        counts: rows of each rank.
    """
    return rows_RD if group.size == 1 else _GatherRows.apply(rows_RD, counts, group)


def scatter_rows(rows_RD: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """Sum over the ranks of their rows [sum(counts), D], each rank getting its own: [counts[own rank], D]."""
    return rows_RD if group.size == 1 else _ScatterRows.apply(rows_RD, counts, group)


def exchange(values: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """All-to-all of uneven parts along the first dimension, ordered by source.  No gradient."""
    return values if group.size == 1 else _all_to_all(values, send, receive, group)


def all_gather_flat(part: Tensor, group: Group) -> Tensor:
    """Parts [N, ...] of one shape from all ranks, one after another: [size * N, ...].  No gradient."""
    if group.size == 1:
        return part
    whole = part.new_empty(group.size * part.shape[0], *part.shape[1:])
    # Another name since torch 2.13, which warns of the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with watched("all-gather", group, part.shape):
        gather(whole, part.contiguous(), group=group.process_group)
    return whole
