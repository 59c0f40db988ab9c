"""What a model costs: parameters and forward FLOPs, counted as if the model were alone.

Of an MoE layer, `top_k` of `num_experts` experts are active for a token.

Legend: T tokens, D model, F ffn, E experts, K top-k, R rows, O output width.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from moeflow.moe import MoELayer


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count parameters, shared ones once.

    Args:
        model: as built, or a rank's part of it (then its own experts count).

    Returns:
        (total, active): active counts top_k / num_experts of each MoE layer's expert parameters.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = 0.0
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            experts = sum(parameter.numel() for parameter in layer.experts.parameters())
            idle += experts * (1.0 - min(1.0, layer.gate.config.top_k / layer.num_experts))
    return total, total - round(idle)


def forward_flops(model: nn.Module, sample_inputs: Tensor) -> int:
    """FLOPs of the forward pass of `sample_inputs`, of matrix products and convolutions (2 a multiply-add).

    An MoE layer counts its gate, its shared experts and top_k others a token: what runs without a capacity, and the
    most that runs with one.  Nothing is computed: a copy of the model is traced that has shapes only.

    Args:
        model: on any device, built as if it were alone.
        sample_inputs: as for `model`, with a batch dimension; only shape and dtype matter.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    with FakeTensorMode(), torch.no_grad():
        shadow = _on_active_paths(_without_values(model).eval())
        inputs = torch.empty(sample_inputs.shape, dtype=sample_inputs.dtype)
        with counter:
            shadow(inputs)
    return counter.get_total_flops()


class _ActivePath(nn.Module):
    """Stands in for an MoE layer: which experts a token goes to depends on values, which are not there."""

    def __init__(self, layer: MoELayer):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        x_TD = x.reshape(-1, layer.d_model)
        for matrix in layer.gate.parameters():
            if matrix.ndim == 2:
                nn.functional.linear(x_TD.new_empty(len(x_TD), matrix.shape[1]), matrix)
        rows_RD = x_TD.repeat(layer.gate.config.top_k, 1)
        rows_RO = layer.experts(rows_RD, torch.empty(layer.num_experts, dtype=torch.int64))
        y_TO = rows_RO[: len(x_TD)]
        if layer.shared is not None:
            y_TO = layer.shared(x_TD, y_TO)
        return y_TO.reshape(*x.shape[:-1], layer.experts.d_out)


def _on_active_paths(module: nn.Module) -> nn.Module:
    if isinstance(module, MoELayer):
        return _ActivePath(module)
    for name, child in module.named_children():
        setattr(module, name, _on_active_paths(child))
    return module


def _without_values(model: nn.Module) -> nn.Module:
    """A copy of the model on the CPU, in tensors without memory; the original stays as it is."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, MoELayer):
            memo[id(module.last_stats)] = None
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                memo[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _grouped_mlp_flops(
    rows_RD: torch.Size, counts_E: torch.Size, w_in: torch.Size, b_in: Any, w_out_EOF: torch.Size, *_: Any, **__: Any
) -> int:
    """Each row passes through one expert: w_in [E, F, D] or [E, 2, F, D], then w_out [E, O, F]."""
    return 2 * rows_RD[0] * (math.prod(w_in[1:]) + math.prod(w_out_EOF[1:]))


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


# The CPU's attention kernel is the one that torch has no formula for.
_FORMULAS = {
    torch.ops.moeflow.grouped_mlp: _grouped_mlp_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}
