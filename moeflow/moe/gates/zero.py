"""Zero gate.

Legend: T tokens, D model, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow.moe.gates.base import NO_CONTEXT, Gate, GateOutput, TokenContext


class ZeroGate(Gate):
    """The first K experts for every token, with weights 1 / K; no parameters, no losses.

    For timing: the worst load there is.  FastMoE's sends all choices to expert 0 and fails for K >= 2.
    """

    def build(self, d_model: int) -> None:
        pass

    def forward(self, x_TD: Tensor, context: TokenContext = NO_CONTEXT) -> GateOutput:
        ids_TK = torch.arange(self.top_k, device=x_TD.device).expand(x_TD.shape[0], -1)
        return self.fixed_output(ids_TK.contiguous(), x_TD.dtype, context)
