"""Gate that is balanced by a bias instead of a loss.

Legend: T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeflow.moe.gates.group_limited import GroupLimitedGate


class AuxFreeGate(GroupLimitedGate):
    """Experts by score plus bias, weights by the score alone (Wang et al., arXiv:2408.15664, algorithm 1).

    After each optimizer step an expert's bias goes up by `bias_update_rate` where its load over the whole batch was
    below the mean, and down where it was above.  With groups and sigmoid scores it is DeepSeek-V3's gate
    (arXiv:2412.19437, section 2.1.2).

    The load is counted once for each token, also where activation checkpointing runs the forward pass again (torchtitan
    counts twice), and is summed over all ranks by `moeflow.moe.gates.after_step`.  The bias stays fp32 when the model
    is cast to a half type.
    """

    tracks_load = True
    selection_bias_E: Tensor

    def build(self, d_model: int) -> None:
        super().build(d_model)
        self.register_buffer("selection_bias_E", torch.zeros(self.num_experts, dtype=torch.float32))

    def choice_bias(self) -> Tensor:
        return self.selection_bias_E

    def after_step(self, counts_E: Tensor) -> None:
        self.update_bias(counts_E)
        super().after_step(counts_E)

    @torch.no_grad()
    def update_bias(self, counts_E: Tensor) -> None:
        """b_e += rate * sign(mean load - load of e); counts_E is the load of one optimizer step over all ranks, [E]."""
        counts_E = counts_E.to(self.selection_bias_E.device, torch.float32)
        self.selection_bias_E += self.config.bias_update_rate * torch.sign(counts_E.mean() - counts_E)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        bias_E = self.selection_bias_E
        super()._apply(fn, recurse)
        if self.selection_bias_E.dtype != torch.float32:
            moved_E = bias_E if bias_E.is_meta else bias_E.to(self.selection_bias_E.device)
            self.selection_bias_E = moved_E
        return self
