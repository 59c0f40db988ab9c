"""All-to-all in two hops: inside the node to the rank in the receiver's place, then between nodes.

Between nodes each rank then sends one message for each node instead of one for each rank, `ranks per node` times as
large (Tutel, arXiv:2206.03382, section 3.4; the same rows reach the same ranks in the same order as in one hop).

Legend: R rows, D model, N nodes, P places (ranks of the group on each node).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow import ops
from moeflow.parallel import collectives
from moeflow.parallel.topology import Group, subgroup


@dataclass(frozen=True)
class TwoHop:
    """The groups of both hops.

    Attributes:
        whole: all ranks, node by node.
        node: ranks of this node.
        rail: ranks in this place on every node.
    """

    whole: Group
    node: Group
    rail: Group

    @classmethod
    def over(cls, group: Group, names: list[str], timeout_s: float) -> TwoHop | None:
        """Form the groups; every rank of the group calls it.

        Args:
            group: whose rows are exchanged.
            names: the node of each of its ranks.
            timeout_s: seconds that a collective may take.

        Returns:
            None where the group is on one node, or has one rank on each, or where nodes hold unequal numbers of its
            ranks or not consecutive ones.
        """
        places = names.count(names[0])
        nodes = len(set(names))
        if nodes == 1 or places == 1 or names != [names[i // places * places] for i in range(group.size)]:
            return None
        if nodes * places != group.size:
            return None
        first = group.rank // places * places
        node = subgroup(group, "node", range(first, first + places), timeout_s)
        rail = subgroup(group, "rail", range(group.rank % places, group.size, places), timeout_s)
        return cls(group, node, rail)

    def exchange(self, rows_RD: Tensor, send: Tensor) -> Tensor:
        """Send rows to all ranks of the group and receive theirs; differentiable.

        Args:
            rows_RD: [R, D], ordered by receiver.
            send: int64 [size], rows for each.

        Returns:
            Rows ordered by sender.
        """
        nodes, places = self.rail.size, self.node.size
        rank = self.whole.rank
        every_WW = torch.stack(collectives.all_gather(send.contiguous(), self.whole))
        by_node = every_WW.view(nodes, places, nodes, places)  # sender's node and place, receiver's node and place
        own_NP = by_node[rank // places, rank % places]
        # First by the receiver's place, then by its node.
        rows_RD = ops.regroup(rows_RD, own_NP)
        hop = by_node[rank // places]  # [sender's place, receiver's node, receiver's place]
        here = hop[:, :, rank % places]  # rows that the ranks of this node have for this rank's rail
        sent, received = torch.stack([own_NP.sum(0), here.sum(1)]).tolist()
        rows_RD = collectives.all_to_all_rows(rows_RD, sent, received, self.node)
        # They came by sender's place and then by receiver's node; now the other way about.
        rows_RD = ops.regroup(rows_RD, here)
        arriving = by_node[:, :, rank // places, rank % places]  # [sender's node, sender's place]
        sent, received = torch.stack([here.sum(0), arriving.sum(1)]).tolist()
        return collectives.all_to_all_rows(rows_RD, sent, received, self.rail)
