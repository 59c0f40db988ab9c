"""FastMoE's MLP of a Transformer as an MoE layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moeflow.compat.fmoe.layers import FMoE
from moeflow.compat.fmoe.linear import FMoELinear


class _Expert(nn.Module):
    """Two linear maps with an activation between them, of all experts on this worker."""

    def __init__(
        self, num_expert: int, d_model: int, d_hidden: int, activation: Callable[[Tensor], Tensor], rank: int = 0
    ):
        super().__init__()
        self.htoh4 = FMoELinear(num_expert, d_model, d_hidden, bias=True, rank=rank)
        self.h4toh = FMoELinear(num_expert, d_hidden, d_model, bias=True, rank=rank)
        self.activation = activation

    def forward(self, inp: Tensor, fwd_expert_count: Tensor) -> Tensor:
        """Map rows [R, d_model], ordered by expert, to [R, d_model]."""
        return self.h4toh(self.activation(self.htoh4(inp, fwd_expert_count)), fwd_expert_count)


class FMoETransformerMLP(FMoE):
    """An MoE layer whose experts are MLPs, for tokens of any leading dimensions.

    All experts of a worker run as one.  Checkpoints of FastMoE load whether it kept them so (`experts.htoh4.weight`,
    [E, d_hidden, d_model]) or one by one (`experts.0.htoh4.weight`, [1, d_hidden, d_model], ...).

    Args:
        num_expert: experts on this worker.
        d_model: width of the tokens.
        d_hidden: hidden width of an expert.
        activation: between the two maps.
        expert_dp_comm: group that the experts' gradients are reduced over: "none", "dp", "world", ...
        expert_rank: kept for the signature; has no effect.
        kwargs: of `FMoE`.
    """

    def __init__(
        self,
        num_expert: int = 32,
        d_model: int = 1024,
        d_hidden: int = 4096,
        activation: Callable[[Tensor], Tensor] | None = None,
        expert_dp_comm: str = "none",
        expert_rank: int = 0,
        **kwargs: Any,
    ):
        super().__init__(num_expert=num_expert, d_model=d_model, **kwargs)
        self.experts = _Expert(num_expert, d_model, d_hidden, activation or nn.GELU(), rank=expert_rank)
        self.d_hidden = d_hidden
        self.mark_parallel_comm(expert_dp_comm)
        self.register_load_state_dict_pre_hook(_stacked)

    def forward(self, inp: Tensor) -> Tensor:
        """Map [..., d_model] to the same shape."""
        out: Any = super().forward(inp.reshape(-1, self.d_model))
        return out.reshape(inp.shape)


def _stacked(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Stack the parameters of experts that a checkpoint keeps one by one."""
    assert isinstance(module, FMoETransformerMLP)
    for name, _ in module.experts.named_parameters():
        keys = [f"{prefix}experts.{number}.{name}" for number in range(module.num_expert)]
        if all(key in state for key in keys):
            state[f"{prefix}experts.{name}"] = torch.cat([state.pop(key) for key in keys])
