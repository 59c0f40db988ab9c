"""Dispatch of an MoE layer's rows over the ranks that hold its experts.

    tp    the tokens that all tp ranks hold alike are shared out among them before the gate, and gathered at the end
    ep    rows go to the rank of their expert by an all-to-all with uneven splits, and back
    etp   ranks that each hold a slice of the same experts' hidden dimension gather their rows, and sum the results

Legend: T tokens, R rows, D model, E experts of the layer in all, L experts on this rank, W ranks of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moeflow import ops
from moeflow.moe import Experts
from moeflow.moe.tree import Tree, leaves, tree_map
from moeflow.ops import pool
from moeflow.parallel import collectives, regions
from moeflow.parallel.shared_memory import SharedRows
from moeflow.parallel.topology import Group, Topology

if TYPE_CHECKING:
    from moeflow.parallel.balancer import Balancer
    from moeflow.parallel.exchange import Exchanger
    from moeflow.parallel.two_hop import TwoHop


@dataclass(frozen=True)
class Merge:
    """Rows of the etp ranks, which each hold a slice of the same experts.

    Attributes:
        gathered: rows of each etp rank.
        merged_WL: rows of each local expert from each etp rank.
    """

    gathered: list[int]
    merged_WL: Tensor


@dataclass(frozen=True)
class Way:
    """How many rows go where; what the way back needs.

    Attributes:
        sent: rows sent to each local expert of each ep rank.
        arrived: rows of each local expert from each ep rank.
        arrived_WL: the same as a tensor.
        counts_L: rows of each local expert, from all ep and etp ranks.
        merge: None without etp.
    """

    sent: list[list[int]]
    arrived: list[list[int]]
    arrived_WL: Tensor
    counts_L: Tensor
    merge: Merge | None = None

    @property
    def send(self) -> list[int]:
        """Rows sent to each ep rank."""
        return [sum(row) for row in self.sent]

    @property
    def receive(self) -> list[int]:
        """Rows received from each ep rank."""
        return [sum(row) for row in self.arrived]


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
        self.exchanger: Exchanger | None = None
        self.balancer: Balancer | None = None

    def split_tokens(self, x: Tensor) -> tuple[Tensor, float]:
        if not self._share_out:
            return x, 1.0
        whole = x.shape[-2]
        part = regions.split_tokens(x, self.tp)
        return part, part.shape[-2] * self.tp.size / max(whole, 1)

    def merge_tokens(self, y: Tensor, num_tokens: int) -> Tensor:
        return regions.merge_tokens(y, num_tokens, self.tp) if self._share_out else y

    def dispatch(self, rows_RD: Tensor, tokens_per_expert_E: Tensor) -> tuple[Tensor, Tensor, Way]:
        way = self.way(rows_RD, tokens_per_expert_E)
        return self.send(rows_RD, way), way.counts_L, way

    def combine(self, rows_RD: Tensor, state: Way) -> Tensor:
        return self._from_experts(unmerged(rows_RD, state.merge, self.etp), state)

    def run(self, experts: Experts, rows_RD: Tree, tokens_per_expert_E: Tensor) -> Tree:
        if self.balancer is not None:
            return self.balancer.run(self, experts, rows_RD, tokens_per_expert_E)
        return self.through(experts, rows_RD, self.way(leaves(rows_RD)[0], tokens_per_expert_E))

    def through(self, experts: Experts, rows_RD: Tree, way: Way) -> Tree:
        """Rows to their experts, through them, and back."""
        if self.exchanger is not None and isinstance(rows_RD, Tensor):
            rows_RO = self.exchanger.through(self, experts, rows_RD, way)
            if rows_RO is not None:
                return rows_RO
        rows_RO = experts(tree_map(lambda leaf: self.send(leaf, way), rows_RD), way.counts_L)
        return tree_map(lambda leaf: self.combine(leaf, way), rows_RO)

    def way(self, rows_RD: Tensor, tokens_per_expert_E: Tensor) -> Way:
        """Tell the ranks how many rows come; collective."""
        self.begin(rows_RD, tokens_per_expert_E)
        # Rows leave ordered by expert, hence by destination; all-to-all brings them by source and then by expert.
        sent_WL = tokens_per_expert_E.view(self.ep.size, -1)
        received_WL = collectives.exchange_counts(sent_WL, self.ep)
        # One copy to the host for all: the sizes have to be known there.
        sent, arrived = torch.stack([sent_WL, received_WL]).tolist()
        counts_L = received_WL.sum(0)
        if self.etp.size == 1:
            return Way(sent, arrived, received_WL, counts_L)
        merged_WL = torch.stack(collectives.all_gather(counts_L, self.etp))
        merge = Merge(merged_WL.sum(1).tolist(), merged_WL)
        return Way(sent, arrived, received_WL, merged_WL.sum(0), merge)

    def begin(self, rows_RD: Tensor, tokens_per_expert_E: Tensor) -> None:
        """Before the first exchange: agree on its shape, and share memory where that can be; collective."""
        if self._agreed:
            return
        shape = {"experts": tokens_per_expert_E.numel(), "width": rows_RD.shape[1], "dtype": str(rows_RD.dtype)}
        collectives.agree("the shape of an MoE layer", shape, self.ep)
        self._agreed = True
        if self._may_share and rows_RD.device.type == "cpu":
            self._shared = SharedRows.of(self.ep, tokens_per_expert_E.numel() // self.ep.size)

    def send(self, rows_RD: Tensor, way: Way) -> Tensor:
        """Rows, ordered by expert, to where their experts are; there they are ordered by local expert."""
        return merged(self._to_experts(rows_RD, way), way.merge, self.etp)

    def compute(
        self, rows_RD: Tensor, way: Way, chunk: tuple[int, int], experts: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Some of the local experts, on rows that stand by source and then by expert; outputs in the same order.

        Args:
            rows_RD: that arrived for these experts.
            way: of all rows.
            chunk: the experts [first, last + 1).
            experts: from rows ordered by expert, and int64 rows of each, to outputs.
        """
        arrived_WC, counts_C, merge = way.arrived_WL[:, slice(*chunk)], way.counts_L[slice(*chunk)], way.merge
        if merge is not None:
            merged_WC = merge.merged_WL[:, slice(*chunk)]
            merge = Merge(merged_WC.sum(1).tolist(), merged_WC)
        rows_RD = merged(ops.regroup(rows_RD, arrived_WC), merge, self.etp)
        rows_RO = unmerged(experts(rows_RD, counts_C), merge, self.etp)
        return ops.regroup(rows_RO, arrived_WC, inverse=True)

    @property
    def shares_memory(self) -> bool:
        """Whether rows go through memory that the ranks share."""
        return self._shared is not None

    def _hops(self) -> TwoHop | None:
        """The groups for two hops, where rows take them."""
        choice = self.exchanger.choice if self.exchanger is not None else None
        return (
            self.exchanger.two_hop
            if self.exchanger is not None and choice is not None and choice.hierarchical
            else None
        )

    def _to_experts(self, rows_RD: Tensor, way: Way) -> Tensor:
        if self._shared is not None:
            return _Shared.apply(rows_RD, way, self._shared, self.ep, False)
        two_hop = self._hops()
        if two_hop is not None:
            rows_RD = two_hop.exchange(rows_RD, way.arrived_WL.new_tensor(way.send))
        else:
            rows_RD = collectives.all_to_all_rows(rows_RD, way.send, way.receive, self.ep)
        return ops.regroup(rows_RD, way.arrived_WL)

    def _from_experts(self, rows_RD: Tensor, way: Way) -> Tensor:
        if self._shared is not None:
            return _Shared.apply(rows_RD, way, self._shared, self.ep, True)
        rows_RD = ops.regroup(rows_RD, way.arrived_WL, inverse=True)
        two_hop = self._hops()
        if two_hop is not None:
            return two_hop.exchange(rows_RD, way.arrived_WL.new_tensor(way.receive))
        return collectives.all_to_all_rows(rows_RD, way.receive, way.send, self.ep)


def merged(rows_RD: Tensor, merge: Merge | None, etp: Group) -> Tensor:
    """Rows of all etp ranks, ordered by expert."""
    if merge is None:
        return rows_RD
    return ops.regroup(collectives.gather_rows(rows_RD, merge.gathered, etp), merge.merged_WL)


def unmerged(rows_RD: Tensor, merge: Merge | None, etp: Group) -> Tensor:
    """The sum over the etp ranks of the outputs of this rank's rows: `merged` undone."""
    if merge is None:
        return rows_RD
    rows_RD = ops.regroup(rows_RD, merge.merged_WL, inverse=True)
    return collectives.scatter_rows(rows_RD, merge.gathered, etp)


class _Shared(torch.autograd.Function):
    """Rows to their experts through shared memory, or back; the gradient of either is the other one."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, way: Way, shared: SharedRows, ep: Group, back: bool) -> Tensor:
        ctx.way, ctx.shared, ctx.ep, ctx.back = way, shared, ep, back
        return _through_memory(rows_RD, way, shared, ep, back)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> Any:
        grad_RD = _through_memory(grad_RD, ctx.way, ctx.shared, ctx.ep, not ctx.back)
        return grad_RD, None, None, None, None


def _through_memory(rows_RD: Tensor, way: Way, shared: SharedRows, ep: Group, back: bool) -> Tensor:
    ranks, local = len(way.arrived), len(way.arrived[0])
    # At the source rows stand by rank and then by expert; at their experts, by expert and then by source.
    by_rank = _blocks([count for row in way.sent for count in row])
    here = [by_rank[rank * local : (rank + 1) * local] for rank in range(ranks)]
    by_expert = _blocks([row[expert] for expert in range(local) for row in way.arrived])
    there = [by_expert[rank::ranks] for rank in range(ranks)]
    outgoing, incoming, num_rows = (there, here, sum(way.send)) if back else (here, there, sum(way.receive))
    out_RD = pool.empty((num_rows, *rows_RD.shape[1:]), rows_RD)
    return shared.exchange(ep, rows_RD.contiguous(), outgoing, out_RD, incoming)


def _blocks(counts: list[int]) -> list[tuple[int, int]]:
    """Where consecutive blocks of these lengths begin and end."""
    ends = list(accumulate(counts))
    return [(end - count, end) for count, end in zip(counts, ends, strict=True)]
