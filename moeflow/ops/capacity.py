"""Capacity: how many tokens an expert takes, and who is dropped when more come.

Legend: T tokens, E experts, K top-k, C capacity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeflow.ops import backend
from moeflow.ops.plan import histogram


def expert_capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Return C = ceil(factor * K * T / E), in tokens (Switch Transformer, arXiv:2101.03961, section 2.2, for any K).

    T is the number of tokens at this rank, so that an expert on another rank receives up to C from each source.
    """
    # The product is rounded first: 1.1 * 100 is 110.00000000000001 in binary and would give one token more.
    return math.ceil(round(factor * top_k * num_tokens / num_experts, 9))


def limit_by_capacity(
    ids_TK: Tensor, num_experts: int, capacity: int, policy: str = "position", priority_TK: Tensor | None = None
) -> Tensor:
    """Replace by -1 the choices that find their expert full.

    Args:
        ids_TK: integer [T, K], negative where a choice is dropped already.
        num_experts: E.
        capacity: C, the most choices an expert keeps.
        policy: "position" keeps first choices in token order, then second choices, and so on (GShard,
            arXiv:2006.16668, algorithm 1); "probability" keeps those of the highest priority, ties by position;
            "random" draws the order from torch's generator.
        priority_TK: [T, K], needed by "probability": usually the gate's weights.

    Returns:
        ids [T, K] of the same dtype; the same for the same input, whatever the device.
    """
    num_tokens, top_k = ids_TK.shape
    if policy != "random" and backend.use_cupy("limit_by_capacity", ids_TK, num_experts):
        from moeflow.ops import kernel_calls

        chosen_TK = None if policy == "position" else priority_TK
        if chosen_TK is not None:
            chosen_TK = chosen_TK.detach().to(torch.float32).contiguous()
        kept_TK = kernel_calls.limit_by_capacity(ids_TK.to(torch.int64).contiguous(), num_experts, capacity, chosen_TK)
        return kept_TK.to(ids_TK.dtype)
    # Choice-major order, which "position" keeps and the other policies start from.
    ids_N = ids_TK.t().reshape(-1)
    if policy == "position":
        order_N = None
    elif policy == "probability":
        assert priority_TK is not None
        order_N = torch.argsort(priority_TK.detach().t().reshape(-1), descending=True, stable=True)
    else:
        assert policy == "random", policy
        order_N = torch.randperm(ids_N.numel(), device=ids_TK.device)
    ordered_N = ids_N if order_N is None else ids_N[order_N]
    kept_N = _position_in_expert(ordered_N, num_experts) < capacity
    if order_N is not None:
        kept_N = torch.empty_like(kept_N).index_copy_(0, order_N, kept_N)
    return torch.where(kept_N.view(top_k, num_tokens).t(), ids_TK, -1)


def _position_in_expert(ids_N: Tensor, num_experts: int) -> Tensor:
    """For each entry, how many earlier entries name the same expert; int64 [N].  Negative entries give anything."""
    counts_E = histogram(ids_N, num_experts)
    first_E = torch.cumsum(counts_E, 0) - counts_E
    bin_N = torch.where(ids_N < 0, num_experts, ids_N).to(torch.int64)
    order_N = torch.argsort(bin_N, stable=True)
    rank_N = torch.empty_like(bin_N)
    rank_N[order_N] = torch.arange(ids_N.numel(), device=ids_N.device)
    return rank_N - torch.cat([first_E, first_E.new_zeros(1)])[bin_N]
