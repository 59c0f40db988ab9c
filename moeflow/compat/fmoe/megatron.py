"""FastMoE's way to make a Megatron-LM model an MoE model.

Works on any model whose layers are modules with an attribute `mlp` of the maps `dense_h_to_4h` and `dense_4h_to_h`, as
Megatron-LM's have; Megatron itself is not imported.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from moeflow.compat.fmoe.distributed import DistributedGroupedDataParallel
from moeflow.compat.fmoe.transformer import FMoETransformerMLP
from moeflow.errors import ConfigError


class MegatronMLP(FMoETransformerMLP):
    """The MoE layer in Megatron's place of an MLP: returns (output, bias), the bias being zeros."""

    def __init__(self, d_model: int, d_hidden: int, num_layers: int, init_std: float = 0.02, **kwargs: Any):
        super().__init__(d_model=d_model, d_hidden=d_hidden, **kwargs)
        with torch.no_grad():
            self.experts.htoh4.weight.normal_(0.0, init_std)
            self.experts.h4toh.weight.normal_(0.0, init_std / math.sqrt(2.0 * num_layers))
        self.register_buffer("no_bias", torch.zeros(d_model), persistent=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map [..., d_model]."""
        return super().forward(hidden_states), self.no_bias  # type: ignore[return-value]


def fmoefy(
    model: nn.Module,
    fmoe_num_experts: int | None = None,
    distributed_experts: bool = True,
    hidden_hidden_size: int | None = None,
    top_k: int = 2,
    gate: Any = None,
    megatron_version: str | None = None,
    moe_group: Any = None,
    world_size: int = 1,
    **kwargs: Any,
) -> nn.Module:
    """Replace the MLP of every Transformer layer by an MoE layer, in place.

    Args:
        model: with layers that have `mlp.dense_h_to_4h`.
        fmoe_num_experts: experts on this worker.
        distributed_experts: whether workers of `moe_group` hold different experts (gradients stay on the worker) or the
            same ones (reduced over "dp").
        hidden_hidden_size: hidden width of an expert; None keeps the FLOPs of a token: that of the MLP over `top_k`.
        top_k: experts of a token.
        gate: gate class; None is the naive gate.
        megatron_version: kept for the signature; has no effect.
        moe_group: process group that experts are spread over: Megatron's data-parallel group.  One of a pipeline stage
            must not reach over stages.
        world_size: its size.
        kwargs: of `FMoE`.

    Raises:
        ConfigError: no layer has such an MLP, or `fmoe_num_experts` is missing.
    """
    if fmoe_num_experts is None:
        raise ConfigError("fmoe_num_experts is missing", "fmoe_num_experts=4")
    layers = [m for m in model.modules() if hasattr(getattr(m, "mlp", None), "dense_h_to_4h")]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layer with mlp.dense_h_to_4h", "moeflow.moefy, which finds other MLPs"
        )
    if gate is not None:
        kwargs["gate"] = gate
    for layer in layers:
        weight: Tensor = layer.mlp.dense_h_to_4h.weight  # type: ignore[union-attr, assignment]
        mlp = MegatronMLP(
            weight.shape[1],
            hidden_hidden_size or weight.shape[0] // top_k,
            len(layers),
            num_expert=fmoe_num_experts,
            world_size=world_size if distributed_experts else 1,
            moe_group=moe_group,
            top_k=top_k,
            expert_dp_comm="none" if distributed_experts else "dp",
            **kwargs,
        )
        layer.mlp = mlp.to(weight.device, weight.dtype)
    return model


__all__ = ["DistributedGroupedDataParallel", "MegatronMLP", "fmoefy"]
