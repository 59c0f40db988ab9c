"""Topology-aware gate.

Legend: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeflow import ops
from moeflow.errors import ConfigError
from moeflow.moe.gates.base import Gate, TokenContext


class TopologyGate(Gate):
    """Top-k of which at most a share leaves the node (after FasterMoE, PPoPP 2022, section 5.3).

    Of this rank's K T choices at most floor(share * K T), over all slots, name an expert on another node: those of the
    highest score, ties by position.  The other choices that would have left go to the token's best experts on its own
    node; where these do not suffice, the choice is given up.  FasterMoE limits one slot alone, and lets the other go
    anywhere as long as the first choices keep to the limit.

    Attributes:
        share: largest share of the choices that may leave the node; None is no limit.  From `outgoing_share`, or set by
            whoever knows the network's cost.
    """

    may_give_up = True
    node_of_expert_E: Tensor

    def build(self, d_model: int) -> None:
        super().build(d_model)
        self.share: float | None = self.config.outgoing_share
        self.own_node = 0
        self.register_buffer("node_of_expert_E", torch.zeros(self.num_experts, dtype=torch.int64), persistent=False)

    def place(self, node_of_expert: list[int], own_node: int) -> None:
        """Say where the experts are.  Until then everything is one node, and nothing is limited.

        Args:
            node_of_expert: node of each expert of the layer.
            own_node: node of this rank.

        Raises:
            ConfigError: there is not one entry for each expert.
        """
        if len(node_of_expert) != self.num_experts:
            raise ConfigError(
                f"node_of_expert has {len(node_of_expert)} entries: it must have one for each of the "
                f"{self.num_experts} experts"
            )
        device = self.node_of_expert_E.device
        self.node_of_expert_E = torch.tensor(node_of_expert, dtype=torch.int64, device=device)
        self.own_node = own_node

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, context: TokenContext) -> tuple[Tensor, Tensor]:
        weights_TK, ids_TK = ops.top_k(scores_TE, self.top_k)
        if self.share is None:
            return ids_TK, weights_TK
        away_E = self.node_of_expert_E != self.own_node
        score_TK, away_TK, num_choices = weights_TK.detach(), away_E[ids_TK], ids_TK.numel()
        if context.valid_T is not None:
            away_TK = away_TK & context.valid_T[:, None]
            num_choices = int(context.valid_T.sum()) * self.top_k
        limit = math.floor(round(self.share * num_choices, 9))
        # Choice-major, so that of equal scores first choices go first.
        order_N = torch.argsort(torch.where(away_TK, score_TK, -1).t().reshape(-1), descending=True, stable=True)
        allowed_N = torch.zeros_like(order_N, dtype=torch.bool)
        allowed_N[order_N[:limit]] = True
        allowed_TK = allowed_N.view(self.top_k, -1).t() & away_TK
        # What may be chosen: the own node's experts, and the experts that the token may leave for.
        allowed_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, ids_TK, allowed_TK) | ~away_E
        _, ids_TK = ops.top_k(torch.where(allowed_TE, scores_TE.detach(), -1), self.top_k)
        weights_TK = scores_TE.gather(1, ids_TK)
        given_up_TK = ~allowed_TE.gather(1, ids_TK)
        return ids_TK.masked_fill(given_up_TK, -1), weights_TK.masked_fill(given_up_TK, 0)
