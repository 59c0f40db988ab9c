"""Losses that keep a gate balanced and its logits small.

Legend: T tokens, E experts, K top-k, B sequences.

Statistics over the whole batch go through `batch_mean`, which turns this rank's mean into the mean over all ranks that
hold tokens of the batch, while the gradient stays that of the own tokens.  Then the mean of the ranks' gradients is the
gradient of the loss of the whole batch: the same on every layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BatchMean = Callable[[Tensor], Tensor]


def alone(local_mean: Tensor) -> Tensor:
    """The batch mean of a process that has the whole batch."""
    return local_mean


def choice_share(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Share of the choices that each expert got: f_e = c_e / (T K), float32 [E].  Sums to 1 (to 0 without tokens)."""
    counts_E = torch.zeros(num_experts, dtype=torch.float32, device=ids_TK.device)
    ids_N = ids_TK.reshape(-1)
    counts_E = counts_E.scatter_add(0, ids_N, torch.ones_like(ids_N, dtype=torch.float32))
    return counts_E / max(ids_TK.numel(), 1)


def load_balance(probs_TE: Tensor, ids_TK: Tensor, batch_mean: BatchMean = alone) -> Tensor:
    """Load-balance loss E * sum_e f_e P_e over the batch; 1 when balanced.

    Switch Transformer (arXiv:2101.03961), equations 4 to 6, with f over all K choices.  Only P carries a gradient.

    Args:
        probs_TE: [T, E], probabilities (rows sum to 1).
        ids_TK: int64 [T, K], the gate's choices before capacity.
        batch_mean: see the top of the module.

    Returns:
        float32 0-dim.
    """
    num_tokens, num_experts = probs_TE.shape
    prob_E = probs_TE.float().sum(0) / max(num_tokens, 1)
    return num_experts * torch.dot(batch_mean(choice_share(ids_TK, num_experts)), batch_mean(prob_E))


def sequence_load_balance(
    probs_TE: Tensor, ids_TK: Tensor, sequence_length: int, sequence_mean: BatchMean = alone
) -> Tensor:
    """The load-balance loss of each sequence by itself, averaged (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).

    Does not change with the size of the micro-batch, and needs communication only where several ranks hold a part of
    each sequence.

    Args:
        probs_TE: [T, E] with T = B * sequence_length, sequences one after another.
        ids_TK: int64 [T, K].
        sequence_length: tokens of one sequence on this rank.
        sequence_mean: mean over the ranks that hold a part of each sequence, like `batch_mean`.
    """
    num_experts, top_k = probs_TE.shape[1], ids_TK.shape[1]
    ids_BN = ids_TK.reshape(-1, sequence_length * top_k)
    counts_BE = torch.zeros(ids_BN.shape[0], num_experts, dtype=torch.float32, device=ids_TK.device)
    counts_BE = counts_BE.scatter_add(1, ids_BN, torch.ones_like(ids_BN, dtype=torch.float32))
    prob_BE = probs_TE.float().view(-1, sequence_length, num_experts).mean(1)
    share_BE = sequence_mean(counts_BE / (sequence_length * top_k))
    per_sequence_B = num_experts * (share_BE * sequence_mean(prob_BE)).sum(1)
    return per_sequence_B.sum() / max(per_sequence_B.numel(), 1)


def z_loss(logits_TE: Tensor) -> Tensor:
    """mean_t logsumexp(logits_t)^2 (ST-MoE, arXiv:2202.08906, equation 5)."""
    return torch.logsumexp(logits_TE.float(), dim=1).square().sum() / max(logits_TE.shape[0], 1)


def squared_variation(values_E: Tensor) -> Tensor:
    """Squared coefficient of variation, var / mean^2, of the experts' totals (arXiv:1701.06538, equation 7).

    The variance is the unbiased one; a single expert has no variation.  Scale-free, so totals and means serve alike.
    """
    if values_E.numel() < 2:
        return values_E.new_zeros(())
    return values_E.float().var() / (values_E.float().mean().square() + 1e-10)


def entropy(probs_TE: Tensor) -> Tensor:
    """Mean entropy of the rows, in nats."""
    return torch.special.entr(probs_TE).sum() / max(probs_TE.shape[0], 1)
