"""Dispatch of an MoE layer's rows over the ranks that hold its experts.

    tp    the tokens that all tp ranks hold alike are shared out among them before the gate, and gathered at the end
    ep    rows go to the rank of their expert by an all-to-all with uneven splits, and back
    etp   ranks that each hold a slice of the same experts' hidden dimension gather their rows, and sum the results

Legend: T tokens, R rows, D model, E experts of the layer in all, L experts on this rank, W ranks of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moeflow import ops
from moeflow.moe import Experts
from moeflow.moe.dispatcher import run_plain
from moeflow.moe.tree import Tree
from moeflow.ops import pool
from moeflow.parallel import collectives, regions
from moeflow.parallel.shared_memory import SharedRows
from moeflow.parallel.topology import Topology


@dataclass(frozen=True)
class _Way:
    """What the way back needs.

    Attributes:
        send: rows sent to each ep rank.
        receive: rows received from each ep rank.
        arrived_WL: rows of each local expert from each ep rank.
        sent: rows sent to each local expert of each ep rank.
        arrived: `arrived_WL` as numbers.
        gathered: rows of each etp rank; None without etp.
        merged_WL: rows of each local expert from each etp rank.
    """

    send: list[int]
    receive: list[int]
    arrived_WL: Tensor
    sent: list[list[int]]
    arrived: list[list[int]]
    gathered: list[int] | None = None
    merged_WL: Tensor | None = None


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
        self._may_share = topology.shared_memory
        self._shared: SharedRows | None = None

    def split_tokens(self, x: Tensor) -> tuple[Tensor, float]:
        if not self._share_out:
            return x, 1.0
        whole = x.shape[-2]
        part = regions.split_tokens(x, self.tp)
        return part, part.shape[-2] * self.tp.size / max(whole, 1)

    def merge_tokens(self, y: Tensor, num_tokens: int) -> Tensor:
        return regions.merge_tokens(y, num_tokens, self.tp) if self._share_out else y

    def dispatch(self, rows_RD: Tensor, tokens_per_expert_E: Tensor) -> tuple[Tensor, Tensor, _Way]:
        # Rows leave ordered by expert, hence by destination; all-to-all brings them by source and then by expert.
        sent_WL = tokens_per_expert_E.view(self.ep.size, -1)
        if not self._agreed:
            shape = {"experts": tokens_per_expert_E.numel(), "width": rows_RD.shape[1], "dtype": str(rows_RD.dtype)}
            collectives.agree("the shape of an MoE layer", shape, self.ep)
            self._agreed = True
            if self._may_share and rows_RD.device.type == "cpu":
                self._shared = SharedRows.of(self.ep, sent_WL.shape[1])
        received_WL = collectives.exchange_counts(sent_WL, self.ep)
        # One copy to the host for all: the sizes have to be known there.
        sent, arrived = torch.stack([sent_WL, received_WL]).tolist()
        send, receive = [sum(row) for row in sent], [sum(row) for row in arrived]
        way = _Way(send, receive, received_WL, sent, arrived)
        rows_RD = self._to_experts(rows_RD, way)
        counts_L = received_WL.sum(0)
        if self.etp.size == 1:
            return rows_RD, counts_L, way
        counts_WL = torch.stack(collectives.all_gather(counts_L, self.etp))
        gathered = counts_WL.sum(1).tolist()
        rows_RD = ops.regroup(collectives.gather_rows(rows_RD, gathered, self.etp), counts_WL)
        return rows_RD, counts_WL.sum(0), replace(way, gathered=gathered, merged_WL=counts_WL)

    def combine(self, rows_RD: Tensor, state: _Way) -> Tensor:
        if state.gathered is not None:
            assert state.merged_WL is not None
            rows_RD = ops.regroup(rows_RD, state.merged_WL, inverse=True)
            rows_RD = collectives.scatter_rows(rows_RD, state.gathered, self.etp)
        return self._from_experts(rows_RD, state)

    def _to_experts(self, rows_RD: Tensor, way: _Way) -> Tensor:
        if self._shared is not None:
            return _Shared.apply(rows_RD, way, self._shared, False)
        rows_RD = collectives.all_to_all_rows(rows_RD, way.send, way.receive, self.ep)
        return ops.regroup(rows_RD, way.arrived_WL)

    def _from_experts(self, rows_RD: Tensor, way: _Way) -> Tensor:
        if self._shared is not None:
            return _Shared.apply(rows_RD, way, self._shared, True)
        rows_RD = ops.regroup(rows_RD, way.arrived_WL, inverse=True)
        return collectives.all_to_all_rows(rows_RD, way.receive, way.send, self.ep)

    def run(self, experts: Experts, rows_RD: Tree, tokens_per_expert_E: Tensor) -> Tree:
        return run_plain(self, experts, rows_RD, tokens_per_expert_E)


class _Shared(torch.autograd.Function):
    """Rows to their experts through shared memory, or back; the gradient of either is the other one."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, way: _Way, shared: SharedRows, back: bool) -> Tensor:
        ctx.way, ctx.shared, ctx.back = way, shared, back
        return _through_memory(rows_RD, way, shared, back)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        return _through_memory(grad_RD, ctx.way, ctx.shared, not ctx.back), None, None, None


def _through_memory(rows_RD: Tensor, way: _Way, shared: SharedRows, back: bool) -> Tensor:
    ranks, local = len(way.arrived), len(way.arrived[0])
    # At the source rows stand by rank and then by expert; at their experts, by expert and then by source.
    by_rank = _blocks([count for row in way.sent for count in row])
    here = [by_rank[rank * local : (rank + 1) * local] for rank in range(ranks)]
    by_expert = _blocks([row[expert] for expert in range(local) for row in way.arrived])
    there = [by_expert[rank::ranks] for rank in range(ranks)]
    outgoing, incoming, num_rows = (there, here, sum(way.send)) if back else (here, there, sum(way.receive))
    out_RD = pool.empty((num_rows, *rows_RD.shape[1:]), rows_RD)
    return shared.exchange(rows_RD.contiguous(), outgoing, out_RD, incoming)


def _blocks(counts: list[int]) -> list[tuple[int, int]]:
    """Where consecutive blocks of these lengths begin and end."""
    ends = list(accumulate(counts))
    return [(end - count, end) for count, end in zip(counts, ends, strict=True)]
