"""Expert choice.

Legend: T tokens, E experts, C capacity, K the most experts that a token got, B pools, S tokens of a pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow import ops
from moeflow.errors import ConfigError
from moeflow.moe.gates.base import NO_CONTEXT, Gate, GateOutput, TokenContext


class ExpertChoiceGate(Gate):
    """Each expert picks its C best tokens (Zhou et al., arXiv:2202.09368, section 3.2), ties to the earlier token.

    C = ceil(capacity_factor * top_k * S / E) of a pool of S tokens, so a token gets top_k * capacity_factor experts on
    average, and from none to all of them.  The load is even by construction.

    The pool is this rank's micro-batch, or each sequence by itself.  With several data or expert-parallel ranks each
    rank's tokens are a pool of their own, so only `pool=sequence` gives the same results on every layout.  A token's
    experts depend on the later tokens of its pool: in a causal language model the gate sees the future.
    """

    may_give_up = True
    limits_itself = True

    def _check_options(self) -> None:
        super()._check_options()
        if self.config.pad_to_capacity and self.config.pool == "sequence":
            raise ConfigError(
                "gate.pad_to_capacity=true: does nothing with gate.pool=sequence, whose experts are full already",
                "gate.pad_to_capacity=false",
            )
        if self.config.capacity_factor is None:
            raise ConfigError(
                "gate.capacity_factor=null: with gate=expert_choice it says how many tokens an expert picks",
                "gate.capacity_factor=1.0",
            )

    def forward(self, x_TD: Tensor, context: TokenContext = NO_CONTEXT) -> GateOutput:
        logits_TE = self.logits(x_TD)
        scores_TE = self.scores(logits_TE)
        chosen_TE = self._pick(scores_TE.detach(), context)
        # The number of columns depends on the data: it is read on the host.
        top_k = max(int(chosen_TE.sum(1).max()), 1) if chosen_TE.shape[0] else 1
        _, ids_TK = ops.top_k(torch.where(chosen_TE, scores_TE.detach(), -1), top_k)
        missing_TK = ~chosen_TE.gather(1, ids_TK)
        weights_TK = scores_TE.gather(1, ids_TK).masked_fill(missing_TK, 0)
        return self.output(logits_TE, scores_TE, ids_TK.masked_fill(missing_TK, -1), weights_TK, context)

    def needs_whole_sequences(self, context: TokenContext) -> bool:
        return self.config.pool == "sequence"

    def _pick(self, scores_TE: Tensor, context: TokenContext) -> Tensor:
        """Which tokens each expert picks: bool [T, E]."""
        num_tokens = scores_TE.shape[0]
        size = num_tokens
        if self.config.pool == "sequence":
            if context.sequence_length is None:
                raise ConfigError(
                    "gate.pool=sequence: the tokens of this layer do not come in sequences", "gate.pool=batch"
                )
            size = context.sequence_length
        capacity = min(self.capacity(size) or 0, size)
        if context.valid_T is not None:
            scores_TE = torch.where(context.valid_T[:, None], scores_TE, -1)
        score_BSE = scores_TE.view(-1, size, self.num_experts) if size else scores_TE.view(0, 1, self.num_experts)
        best_BCE = torch.argsort(score_BSE, dim=1, descending=True, stable=True)[:, :capacity]
        chosen_BSE = torch.zeros_like(score_BSE, dtype=torch.bool).scatter(1, best_BCE, True)
        chosen_TE = chosen_BSE.reshape(num_tokens, self.num_experts)
        return chosen_TE if context.valid_T is None else chosen_TE & context.valid_T[:, None]
