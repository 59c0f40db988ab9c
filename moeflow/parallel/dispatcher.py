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
from moeflow.moe import Experts
from moeflow.moe.dispatcher import run_plain
from moeflow.moe.tree import Tree
from moeflow.parallel import collectives, regions
from moeflow.parallel.topology import Topology


@dataclass(frozen=True)
class _Way:
    """What the way back needs.

    Attributes:
        send: rows sent to each ep rank.
        receive: rows received from each ep rank.
        arrived_WL: rows of each local expert from each ep rank.
        gathered: rows of each etp rank; None without etp.
        merged_WL: rows of each local expert from each etp rank.
    """

    send: list[int]
    receive: list[int]
    arrived_WL: Tensor
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
        rows_RD = ops.regroup(rows_RD, received_WL)
        counts_L = received_WL.sum(0)
        if self.etp.size == 1:
            return rows_RD, counts_L, _Way(send, receive, received_WL)
        counts_WL = torch.stack(collectives.all_gather(counts_L, self.etp))
        gathered = counts_WL.sum(1).tolist()
        rows_RD = ops.regroup(collectives.gather_rows(rows_RD, gathered, self.etp), counts_WL)
        return rows_RD, counts_WL.sum(0), _Way(send, receive, received_WL, gathered, counts_WL)

    def combine(self, rows_RD: Tensor, state: _Way) -> Tensor:
        if state.gathered is not None:
            assert state.merged_WL is not None
            rows_RD = ops.regroup(rows_RD, state.merged_WL, inverse=True)
            rows_RD = collectives.scatter_rows(rows_RD, state.gathered, self.etp)
        rows_RD = ops.regroup(rows_RD, state.arrived_WL, inverse=True)
        return collectives.all_to_all_rows(rows_RD, state.receive, state.send, self.ep)

    def run(self, experts: Experts, rows_RD: Tree, tokens_per_expert_E: Tensor) -> Tree:
        return run_plain(self, experts, rows_RD, tokens_per_expert_E)
