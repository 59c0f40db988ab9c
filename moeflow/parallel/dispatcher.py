"""Dispatch of an MoE layer's rows over the ranks that hold its experts.

    tp    the tokens that all tp ranks hold alike are shared out among them before the gate, and gathered at the end
    ep    rows go to the rank of their expert by an all-to-all with uneven splits, and back
    etp   ranks that each hold a slice of the same experts' hidden dimension gather their rows, and sum the results

Legend: T tokens, R rows, D model, E experts of the layer in all, L experts on this rank, W ranks of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow import ops
from moeflow.parallel import collectives, regions
from moeflow.parallel.topology import Topology


@dataclass(frozen=True)
class _Order:
    """A permutation of rows and its inverse."""

    order_R: Tensor
    inverse_R: Tensor


@dataclass(frozen=True)
class _Way:
    """What the way back needs.

    Attributes:
        send: rows sent to each ep rank.
        receive: rows received from each ep rank.
        arrival: from the order of arrival to the order by local expert; None when they are the same.
        gathered: rows of each etp rank.
        merge: from the order after gathering over etp to the order by local expert; likewise.
    """

    send: list[int]
    receive: list[int]
    arrival: _Order | None = None
    gathered: list[int] | None = None
    merge: _Order | None = None


class RankDispatcher:
    """Sends rows to the ranks of their experts.

    Args:
        topology: of this rank.
        sequence_parallel: whether the layer's input is this tp rank's part of the sequence already.
    """

    def __init__(self, topology: Topology, sequence_parallel: bool = False):
        self.ep, self.etp, self.tp = topology["ep"], topology["etp"], topology["tp"]
        self.token_ranks = self.tp.size
        self._share_out = self.tp.size > 1 and not sequence_parallel
        self._agreed = False

    def split_tokens(self, x: Tensor) -> tuple[Tensor, float]:
        if not self._share_out:
            return x, 1.0
        whole = x.shape[-2]
        part = regions.split_tokens(x, self.tp)
        return part, part.shape[-2] * self.tp.size / max(whole, 1)

    def merge_tokens(self, y: Tensor, num_tokens: int) -> Tensor:
        return regions.merge_tokens(y, num_tokens, self.tp) if self._share_out else y

    def dispatch(self, rows_RD: Tensor, tokens_per_expert_E: Tensor) -> tuple[Tensor, Tensor, _Way]:
        if not self._agreed:
            shape = {"experts": tokens_per_expert_E.numel(), "width": rows_RD.shape[1], "dtype": str(rows_RD.dtype)}
            collectives.agree("the shape of an MoE layer", shape, self.ep)
            self._agreed = True
        # Rows leave ordered by expert, hence by destination; they arrive ordered by source and, from each, by expert.
        sent_WL = tokens_per_expert_E.view(self.ep.size, -1)
        received_WL = collectives.exchange_counts(sent_WL, self.ep)
        # One copy to the host for both: the split sizes of the all-to-all have to be known there.
        send, receive = torch.stack([sent_WL.sum(1), received_WL.sum(1)]).tolist()
        rows_RD = collectives.all_to_all_rows(rows_RD, send, receive, self.ep)
        arrival = _by_expert(received_WL)
        rows_RD = _apply(rows_RD, arrival)
        counts_L = received_WL.sum(0)
        if self.etp.size == 1:
            return rows_RD, counts_L, _Way(send, receive, arrival)
        counts_WL = torch.stack(collectives.all_gather(counts_L, self.etp))
        gathered = counts_WL.sum(1).tolist()
        merge = _by_expert(counts_WL)
        rows_RD = _apply(collectives.gather_rows(rows_RD, gathered, self.etp), merge)
        return rows_RD, counts_WL.sum(0), _Way(send, receive, arrival, gathered, merge)

    def combine(self, rows_RD: Tensor, state: _Way) -> Tensor:
        if state.gathered is not None:
            rows_RD = collectives.scatter_rows(_undo(rows_RD, state.merge), state.gathered, self.etp)
        return collectives.all_to_all_rows(_undo(rows_RD, state.arrival), state.receive, state.send, self.ep)


def _by_expert(counts_WL: Tensor) -> _Order | None:
    if counts_WL.shape[0] == 1 or counts_WL.shape[1] == 1:
        return None
    order_R = rank_major_to_expert_major(counts_WL)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return _Order(order_R, inverse_R)


def _apply(rows_RD: Tensor, order: _Order | None) -> Tensor:
    return rows_RD if order is None else ops.reorder(rows_RD, order.order_R, order.inverse_R)


def _undo(rows_RD: Tensor, order: _Order | None) -> Tensor:
    return rows_RD if order is None else ops.reorder(rows_RD, order.inverse_R, order.order_R)


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
