"""FastMoE's linear map of several experts.

Legend: R rows, E experts on this worker.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moeflow import ops


class FMoELinear(nn.Module):
    """One linear map for each expert on this worker.

    Initial values are those of nn.Linear for one expert.  FastMoE takes the fan-in of the whole stack, which makes them
    sqrt(out_feat) too small.

    Args:
        num_expert: E.
        in_feat: input width.
        out_feat: output width.
        bias: whether there is one.
        rank: kept for the signature; has no effect.
    """

    def __init__(self, num_expert: int, in_feat: int, out_feat: int, bias: bool = True, rank: int = 0):
        super().__init__()
        self.num_expert, self.in_feat, self.out_feat, self.rank = num_expert, in_feat, out_feat, rank
        self.weight = nn.Parameter(torch.empty(num_expert, out_feat, in_feat))
        self.bias = nn.Parameter(torch.zeros(num_expert, out_feat)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights uniformly within 1 / sqrt(in_feat)."""
        bound = 1.0 / math.sqrt(self.in_feat)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, inp: Tensor, fwd_expert_count: Tensor) -> Tensor:
        """Map rows [R, in_feat], ordered by expert, to [R, out_feat]; counts [E] of rows sum to R."""
        counts = fwd_expert_count.to(device=inp.device, dtype=torch.int64).reshape(-1)
        return ops.grouped_linear(inp.to(self.weight.dtype), counts, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"num_expert={self.num_expert}, in_features={self.in_feat}, out_features={self.out_feat}"
