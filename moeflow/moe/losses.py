"""Losses that keep a gate balanced and its logits small.

Legend: T tokens, E experts, K top-k, B sequences, S tokens of a sequence.

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


def _wide(values: Tensor) -> Tensor:
    """At least fp32."""
    return values if values.dtype == torch.float64 else values.float()


def choice_counts(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Choices of each expert, float32 [E]; negative ids (given up, masked) are not counted.  No gradient."""
    ids_N = torch.where(ids_TK < 0, num_experts, ids_TK).reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.float32, device=ids_TK.device)
    return counts.scatter_add(0, ids_N, torch.ones_like(ids_N, dtype=torch.float32))[:num_experts]


def load_balance(
    probs_TE: Tensor,
    ids_TK: Tensor,
    batch_mean: BatchMean = alone,
    num_tokens: Tensor | int | None = None,
    share_E: Tensor | None = None,
) -> Tensor:
    """Load-balance loss E * sum_e f_e P_e over the batch; 1 when balanced.

    Switch Transformer (arXiv:2101.03961), equations 4 to 6, with f over all K choices.  Only P carries a gradient.
    Megatron-LM has the same value; Transformers' is K times larger (its f sums to K).

    Args:
        probs_TE: [T, E], probabilities (rows sum to 1; those of masked tokens are zero).
        ids_TK: int64 [T, K], the gate's choices before capacity.
        batch_mean: see the top of the module.
        num_tokens: tokens that are not masked; None counts all.
        share_E: f of more than this micro-batch, already of all ranks; None takes it of `ids_TK`.

    Returns:
        0-dim, float32 (or float64 for such probabilities).
    """
    num_experts, top_k = probs_TE.shape[1], max(ids_TK.shape[1], 1)
    count = max(probs_TE.shape[0], 1) if num_tokens is None else num_tokens
    prob_E = _wide(probs_TE).sum(0) / count
    if share_E is not None:
        return num_experts * torch.dot(share_E.to(prob_E.dtype), batch_mean(prob_E))
    # One collective for both.
    both_2E = batch_mean(torch.cat([choice_counts(ids_TK, num_experts).to(prob_E.dtype) / (count * top_k), prob_E]))
    return num_experts * torch.dot(both_2E[:num_experts], both_2E[num_experts:])


def sequence_load_balance(
    probs_TE: Tensor,
    ids_TK: Tensor,
    sequence_length: int,
    sequence_mean: BatchMean = alone,
    valid_T: Tensor | None = None,
) -> Tensor:
    """The load-balance loss of each sequence by itself, averaged (DeepSeek-V3, arXiv:2412.19437, equations 17 to 20).

    Does not change with the size of the micro-batch, and needs communication only where several ranks hold a part of
    each sequence.

    Args:
        probs_TE: [T, E] with T = B * sequence_length, sequences one after another.
        ids_TK: int64 [T, K].
        sequence_length: tokens of one sequence on this rank.
        sequence_mean: mean over the ranks that hold a part of each sequence, like `batch_mean`.
        valid_T: bool [T], False where a token is masked; None takes all.
    """
    num_experts, top_k = probs_TE.shape[1], ids_TK.shape[1]
    ids_BN = torch.where(ids_TK < 0, num_experts, ids_TK).reshape(-1, sequence_length * top_k)
    num_sequences = ids_BN.shape[0]
    prob_BE = _wide(probs_TE).view(num_sequences, sequence_length, num_experts).sum(1)
    counts = prob_BE.new_zeros(num_sequences, num_experts + 1)
    counts_BE = counts.scatter_add(1, ids_BN, torch.ones_like(ids_BN, dtype=counts.dtype))[:, :num_experts]
    if valid_T is None:
        tokens_B1 = torch.full_like(counts_BE[:, :1], sequence_length)
    else:
        tokens_B1 = valid_T.view(num_sequences, sequence_length).sum(1, keepdim=True).to(prob_BE.dtype)
    sums = sequence_mean(torch.cat([counts_BE, prob_BE, tokens_B1], dim=1))
    tokens_B = sums[:, -1].detach().clamp(min=1)
    product_B = (sums[:, :num_experts] * sums[:, num_experts:-1]).sum(1)
    return (num_experts * product_B / (tokens_B.square() * top_k)).sum() / max(num_sequences, 1)


def z_loss(logits_TE: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """mean_t logsumexp(logits_t)^2 over the valid tokens (ST-MoE, arXiv:2202.08906, equation 5)."""
    square_T = torch.logsumexp(_wide(logits_TE), dim=1).square()
    if valid_T is None:
        return square_T.sum() / max(logits_TE.shape[0], 1)
    return torch.where(valid_T, square_T, 0).sum() / valid_T.sum().clamp(min=1)


def squared_variation(values_E: Tensor) -> Tensor:
    """Squared coefficient of variation, var / mean^2, of the experts' totals (arXiv:1701.06538, equation 7).

    The variance is the unbiased one; a single expert has no variation.  Scale-free, so totals and means serve alike.
    """
    if values_E.numel() < 2:
        return values_E.new_zeros(())
    return _wide(values_E).var() / (_wide(values_E).mean().square() + 1e-10)


def entropy(probs_TE: Tensor, valid_T: Tensor | None = None) -> Tensor:
    """Mean entropy of the rows of the valid tokens, in nats."""
    entropy_T = torch.special.entr(probs_TE).sum(1)
    if valid_T is None:
        return entropy_T.sum() / max(probs_TE.shape[0], 1)
    return torch.where(valid_T, entropy_T, 0).sum() / valid_T.sum().clamp(min=1)
