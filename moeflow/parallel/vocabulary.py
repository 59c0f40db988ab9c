"""Embedding and cross-entropy over a vocabulary that is cut over ranks.

Legend: N tokens, V vocabulary, P this rank's part of it.

The logits are never gathered: each rank adds its part of the normalizer, and the one that holds the target its logit
(Megatron-LM, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeflow.parallel import collectives
from moeflow.parallel.regions import part_bounds
from moeflow.parallel.topology import Group


def vocabulary_embedding(ids: Tensor, weight_PD: Tensor, vocabulary: int, group: Group) -> Tensor:
    """This rank's part of the sum that is the embedding: rows of other ranks' words are zero."""
    lo, hi = part_bounds(vocabulary, group)
    elsewhere = (ids < lo) | (ids >= hi)
    local = (ids - lo).masked_fill(elsewhere, 0)
    return torch.nn.functional.embedding(local, weight_PD).masked_fill(elsewhere[..., None], 0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NP: Tensor, targets_N: Tensor, lo: int, group: Group) -> Tensor:
        logits_NP = logits_NP.float()
        peak_N = collectives.all_reduce(logits_NP.amax(dim=1), group, "max")
        shifted_NP = logits_NP - peak_N[:, None]
        exp_NP = shifted_NP.exp()
        here_N = (targets_N >= lo) & (targets_N < lo + logits_NP.shape[1])
        local_N = (targets_N - lo).masked_fill(~here_N, 0)
        target_N = shifted_NP.gather(1, local_N[:, None])[:, 0].masked_fill(~here_N, 0)
        sums_2N = collectives.all_reduce(torch.stack([exp_NP.sum(dim=1), target_N]), group)
        ctx.save_for_backward(exp_NP / sums_2N[0][:, None], here_N, local_N)
        return sums_2N[0].log() - sums_2N[1]

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> Any:
        probs_NP, here_N, local_N = ctx.saved_tensors
        grad_NP = probs_NP.clone()
        grad_NP.scatter_add_(1, local_N[:, None], -here_N.to(grad_NP.dtype)[:, None])
        return grad_NP * grad_N[:, None], None, None, None


class VocabularyCrossEntropy:
    """Cross-entropy of logits whose vocabulary is cut over the ranks of a group.

    Args:
        vocabulary: V.
        group: the tp group.
    """

    def __init__(self, vocabulary: int, group: Group):
        self.lo, _ = part_bounds(vocabulary, group)
        self.group = group

    def __call__(self, logits_NP: Tensor, targets_N: Tensor) -> Tensor:
        """Cross-entropy of each token, float32 [N], the same on every rank.

        Args:
            logits_NP: [N, P], this rank's part of the logits.
            targets_N: int64 [N], words of the whole vocabulary.
        """
        return _CrossEntropy.apply(logits_NP, targets_N, self.lo, self.group)
