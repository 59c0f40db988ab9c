"""Sinkhorn gate.

Legend: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow import ops
from moeflow.moe import losses
from moeflow.moe.gates.base import Gate, TokenContext


class SinkhornGate(Gate):
    """Balanced assignment in training, plain top-k in evaluation (BASE layers, arXiv:2103.16716; Megatron-LM's router).

    In training the experts are the top-k of exp(logits) after its rows and columns have been scaled in turn to equal
    sums (Sinkhorn and Knopp 1967), over all tokens of the batch on all ranks.  Weights are the scores of the raw logits
    at those experts: with the defaults, Megatron's for k = 1; with `score=softmax`, its for k > 1.
    """

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, context: TokenContext) -> tuple[Tensor, Tensor]:
        if not self.training:
            return super().choose(logits_TE, scores_TE, context)
        config = self.config
        balanced_TE = sinkhorn(
            logits_TE.detach(), config.tolerance, config.max_iterations, self.batch_mean, context.valid_T
        )
        _, ids_TK = ops.top_k(balanced_TE, self.top_k)
        return ids_TK, scores_TE.gather(1, ids_TK)


@torch.no_grad()
def sinkhorn(
    logits_TE: Tensor,
    tolerance: float = 1e-4,
    max_iterations: int = 100,
    batch_mean: losses.BatchMean = losses.alone,
    valid_T: Tensor | None = None,
) -> Tensor:
    """Scale rows and columns of exp(logits) until every column has the same sum.

    Args:
        logits_TE: [T, E].
        tolerance: stop when the mean absolute change of the columns' scale in one iteration is not above it (each
            scale is of the order of the inverse of a column's mean).
        max_iterations: stop after so many.
        batch_mean: mean over the ranks that hold tokens of the batch; all of them iterate equally often.
        valid_T: bool [T], False where a token is masked; None takes all.

    Returns:
        float32 [T, E]: each row of the order of 1, each column's mean 1 / E over all ranks.
    """
    num_tokens, num_experts = logits_TE.shape
    # A factor on a row changes nothing but the row's scale, so that exp cannot overflow.
    logits_TE = logits_TE.float()
    cost_TE = (logits_TE - logits_TE.amax(dim=1, keepdim=True)).exp()
    weighing_TE = cost_TE if valid_T is None else cost_TE * valid_T[:, None]
    count = float(num_tokens) if valid_T is None else valid_T.sum()
    mean_count = batch_mean(cost_TE.new_zeros(()) + count).clamp(min=1)
    column_E = cost_TE.new_ones(num_experts)
    for _ in range(max_iterations):
        row_T = 1.0 / ((column_E * cost_TE).sum(1) + 1e-8)
        before_E = column_E
        mean_E = batch_mean((row_T[:, None] * weighing_TE).sum(0)) / mean_count
        column_E = 1.0 / (num_experts * (mean_E + 1e-8))
        if (column_E - before_E).abs().mean() <= tolerance:
            break
    return column_E * cost_TE * row_T[:, None]
