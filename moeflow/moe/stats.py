"""What a layer tells about its last forward pass.  Everything is detached."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class MoEStats:
    """Statistics of one forward pass of one layer on this rank.

    Attributes:
        tokens_per_expert_E: int64 [E], choices of each expert as the gate made them, before capacity.
        num_dropped: int64 0-dim, choices dropped for want of capacity.
        losses: name -> 0-dim loss before its coefficient.
        entropy: 0-dim, mean entropy of the gate's probabilities, in nats.
    """

    tokens_per_expert_E: Tensor
    num_dropped: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)
    entropy: Tensor | None = None
