"""One linear map for each expert, as a layer to build experts of.

Legend: R rows, I input width, O output width, L experts on this rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moeflow import ops
from moeflow.moe.experts import Experts, Generators


class GroupedLinear(Experts):
    """nn.Linear of every expert at once, over rows ordered by expert.

    Initial values are nn.Linear's, from the fan-in of one expert (FastMoE's FMoELinear takes that of the whole stack,
    which makes them sqrt(d_out) too small), with a bias of zeros.

    Args:
        num_experts: experts in all.
        d_in: input width.
        d_out: output width.
        bias: whether there is one.

    Example:
        >>> layer = GroupedLinear(4, 16, 32)
        >>> layer(torch.randn(10, 16), torch.tensor([3, 0, 5, 2])).shape
        torch.Size([10, 32])
    """

    def __init__(self, num_experts: int, d_in: int, d_out: int, bias: bool = True):
        super().__init__(num_experts, d_out)
        self.d_in, self.has_bias = d_in, bias
        self._allocate()
        if not self.weight.is_meta:
            self.reset_parameters()

    def _allocate(self, device: torch.device | None = None) -> None:
        self.weight = nn.Parameter(torch.empty(self.num_local, self.d_out, self.d_in, device=device))
        self.bias = nn.Parameter(torch.empty(self.num_local, self.d_out, device=device)) if self.has_bias else None

    def forward(self, rows_RI: Tensor, tokens_per_expert_L: Tensor) -> Tensor:
        """Map rows [R, I], ordered by local expert, to [R, O]; int64 [L] rows of each expert sum to R."""
        return ops.grouped_linear(rows_RI, tokens_per_expert_L, self.weight, self.bias)

    def shard(self, ep_rank: int, ep: int, etp_rank: int = 0, etp: int = 1) -> None:
        self._share_out(ep_rank, ep, etp)
        self._allocate(self.weight.device)

    def reset_parameters(self) -> None:
        """Draw all parameters from torch's default generator."""
        self.init_parameters(lambda *keys: None)

    @torch.no_grad()
    def init_parameters(self, generator: Generators) -> None:
        bound = 1.0 / math.sqrt(self.d_in)
        for local in range(self.num_local):
            self.weight[local].uniform_(-bound, bound, generator=generator("weight", self.first_expert + local))
        if self.bias is not None:
            self.bias.zero_()

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, on this rank={self.num_local}, d_in={self.d_in}, d_out={self.d_out}"
