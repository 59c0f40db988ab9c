"""Dispatch over an expert-parallel group: an all-to-all of rows with uneven splits.

Legend: R rows, D model, E experts of the layer in all, L experts on this rank, W ranks of the group.

Rows leave ordered by expert, hence by destination rank.  They arrive ordered by source rank and, from each source, by
local expert; the experts want them by local expert first.  The way back is the same in reverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow import ops
from moeflow.parallel import collectives
from moeflow.parallel.topology import Group


@dataclass(frozen=True)
class _Way:
    """What `combine` needs of a dispatch.

    Attributes:
        send: rows sent to each rank.
        receive: rows received from each rank.
        order_R: for each row as the experts see it, where it stood on arrival; None when that is the same order.
        inverse_R: the permutation that undoes it.
    """

    send: list[int]
    receive: list[int]
    order_R: Tensor | None = None
    inverse_R: Tensor | None = None


class AllToAllDispatcher:
    """Experts are spread over the ranks of `group`, L consecutive ones on each."""

    token_ranks = 1

    def __init__(self, group: Group):
        self.group = group

    def split_tokens(self, x: Tensor) -> tuple[Tensor, float]:
        return x, 1.0

    def merge_tokens(self, y: Tensor, num_tokens: int) -> Tensor:
        return y

    def dispatch(self, rows_RD: Tensor, tokens_per_expert_E: Tensor) -> tuple[Tensor, Tensor, _Way]:
        sent_WL = tokens_per_expert_E.view(self.group.size, -1)
        received_WL = collectives.exchange_counts(sent_WL, self.group)
        # One copy to the host for both: the split sizes of the all-to-all have to be known there.
        send, receive = torch.stack([sent_WL.sum(1), received_WL.sum(1)]).tolist()
        rows_RD = collectives.all_to_all_rows(rows_RD, send, receive, self.group)
        if received_WL.shape[1] == 1:
            return rows_RD, received_WL.sum(0), _Way(send, receive)
        order_R = rank_major_to_expert_major(received_WL)
        way = _Way(send, receive, order_R, inverse(order_R))
        return ops.reorder(rows_RD, way.order_R, way.inverse_R), received_WL.sum(0), way

    def combine(self, rows_RD: Tensor, state: _Way) -> Tensor:
        if state.order_R is not None:
            rows_RD = ops.reorder(rows_RD, state.inverse_R, state.order_R)
        return collectives.all_to_all_rows(rows_RD, state.receive, state.send, self.group)


def rank_major_to_expert_major(counts_WL: Tensor) -> Tensor:
    """Order that turns rows sorted by (source, expert) into rows sorted by (expert, source).

    Args:
        counts_WL: int64 [W, L], rows from each source for each local expert.

    Returns:
        int64 [R]: entry r is the row, in the first order, that comes r-th in the second.

    Example: counts [[1, 2], [1, 1]] give [0, 3, 1, 2, 4].
    """
    num_rows = int(counts_WL.sum())
    first_WL = (torch.cumsum(counts_WL.flatten(), 0) - counts_WL.flatten()).view_as(counts_WL)
    block_N = counts_WL.t().reshape(-1)
    start_N = torch.cumsum(block_N, 0) - block_N
    shift_R = torch.repeat_interleave(first_WL.t().reshape(-1) - start_N, block_N, output_size=num_rows)
    return torch.arange(num_rows, device=counts_WL.device) + shift_R


def inverse(order_R: Tensor) -> Tensor:
    """The permutation that undoes `order_R`."""
    back_R = torch.empty_like(order_R)
    back_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return back_R
