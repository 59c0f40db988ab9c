"""GShard gate.

Legend: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow.moe.gates.base import Gate, TokenContext


class GShardGate(Gate):
    """Top-2 with a second expert that is taken by chance (GShard, arXiv:2006.16668, algorithm 1).

    In training the second choice is kept with probability min(1, 2 w_2), w_2 its normalized weight; a choice given up
    takes no capacity.  The load-balance loss counts first choices, over all experts of the layer (FastMoE uses the
    experts of one worker, so that its loss shrinks as workers are added).
    """

    may_give_up = True

    def route(self, logits_TE: Tensor, context: TokenContext) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        scores_TE, ids_TK, weights_TK, counts_E = super().route(logits_TE, context)
        if self.training and self.config.random_second:
            weight_TK = weights_TK.detach()
            share_T = weight_TK[:, 1] / weight_TK.sum(dim=1)
            kept_T = torch.rand_like(share_T) < 2 * share_T
            ids_TK = torch.stack([ids_TK[:, 0], torch.where(kept_T, ids_TK[:, 1], -1)], dim=1)
            counts_E = None
        return scores_TE, ids_TK, weights_TK, counts_E

    def balanced_ids(self, ids_TK: Tensor) -> Tensor:
        return ids_TK[:, :1]
