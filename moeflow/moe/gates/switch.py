"""Switch gate.

Legend: T tokens, D model, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow.moe.gates.base import Gate


class SwitchGate(Gate):
    """One expert per token, weighted by its probability (Switch Transformer, arXiv:2101.03961, section 2).

    In training the gate's input is scaled elementwise by U(1 - jitter, 1 + jitter).  The load-balance loss counts the
    choices as the gate made them, before capacity, as equation 5 has it (FastMoE divides by the kept tokens instead,
    so that its loss grows as tokens are dropped).
    """

    def logits(self, x_TD: Tensor) -> Tensor:
        jitter = self.config.jitter
        if self.training and jitter > 0:
            x_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - jitter, 1 + jitter)
        return super().logits(x_TD)
