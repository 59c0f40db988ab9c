"""SWIPE gate.

Legend: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moeflow import ops
from moeflow.moe.gates.base import Gate, TokenContext


class SwipeGate(Gate):
    """Top-k whose overflow moves on instead of being dropped (SWIPE of BaGuaLu, PPoPP 2022).

    In training an expert takes at most its even share ceil(K T / E) of this rank's choices.  A choice that finds it
    full, first choices before second ones and tokens in order, moves to the token's best other expert with room.  So
    nothing is lost, and no token has an expert twice.  Weights are taken at the final experts.  In evaluation it is
    plain top-k.

    FastMoE evens out the workers and not the experts, and may give a token the same expert twice; evenly loaded experts
    make evenly loaded workers on any layout.  The choices that move are handled on the host.
    """

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, context: TokenContext) -> tuple[Tensor, Tensor]:
        _, ids_TK = ops.top_k(scores_TE, self.top_k)
        if self.training and context.valid_T is None:
            ids_TK = even_out(ids_TK, scores_TE.detach())
        elif self.training:
            valid_T = context.valid_T
            ids_TK = ids_TK.clone()
            ids_TK[valid_T] = even_out(ids_TK[valid_T], scores_TE.detach()[valid_T])
        return ids_TK, scores_TE.gather(1, ids_TK)


def even_out(ids_TK: Tensor, scores_TE: Tensor) -> Tensor:
    """Move choices from full experts to experts with room.

    Args:
        ids_TK: int64 [T, K], distinct in each row.
        scores_TE: [T, E], preferences.

    Returns:
        int64 [T, K], distinct in each row; no expert is named more than ceil(K T / E) times.
    """
    num_experts = scores_TE.shape[1]
    capacity = math.ceil(ids_TK.numel() / num_experts)
    kept_TK = ops.limit_by_capacity(ids_TK, num_experts, capacity)
    overflow = (kept_TK < 0).t().nonzero().tolist()  # (k, t), first choices first
    if not overflow:
        return ids_TK
    moving = sorted({t for _, t in overflow})
    preference = dict(
        zip(moving, torch.argsort(scores_TE[moving], dim=1, descending=True, stable=True).tolist(), strict=True)
    )
    places = _Places(kept_TK.tolist(), num_experts, capacity)
    for k, t in overflow:
        places.give(t, k, preference[t])
    return torch.tensor(places.table, dtype=ids_TK.dtype, device=ids_TK.device)


class _Places:
    """Who has a place at which expert; `table` is [T][K] of experts, -1 where a choice has none yet."""

    def __init__(self, table: list[list[int]], num_experts: int, capacity: int):
        self.table, self.capacity = table, capacity
        self.members: list[set[int]] = [set() for _ in range(num_experts)]
        for t, row in enumerate(table):
            for e in row:
                if e >= 0:
                    self.members[e].add(t)

    def give(self, t: int, k: int, preference: list[int]) -> None:
        """Give choice k of token t a place at its best expert with room."""
        others = [e for e in preference if t not in self.members[e]]
        expert = next((e for e in others if len(self.members[e]) < self.capacity), None)
        if expert is None:
            # Every expert with room has this token already.  A full one holds more tokens than one with room, hence a
            # token that the latter lacks: that token moves over and makes place.
            expert = others[0]
            room = next(e for e, members in enumerate(self.members) if len(members) < self.capacity)
            mover = min(self.members[expert] - self.members[room])
            self.table[mover][self.table[mover].index(expert)] = room
            self.members[expert].remove(mover)
            self.members[room].add(mover)
        self.table[t][k] = expert
        self.members[expert].add(t)
