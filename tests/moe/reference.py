"""An MoE layer written as a loop over tokens, and the inputs that gates are tried on.

Legend: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

Expert = Callable[[Tensor], Tensor]
FUNCTIONS = {"relu": functional.relu, "gelu": functional.gelu, "silu": functional.silu, "swiglu": functional.silu}


def moe_by_loop(x_TD: Tensor, ids: Sequence[Sequence[int]], weights_TK: Tensor, experts: Sequence[Expert]) -> Tensor:
    """y_t = sum_k w_tk expert_{id_tk}(x_t); negative ids add nothing."""
    width = experts[0](x_TD.new_zeros(x_TD.shape[1])).shape[-1]
    rows = []
    for t, chosen in enumerate(ids):
        y = x_TD.new_zeros(width)
        for k, e in enumerate(chosen):
            if e >= 0:
                y = y + weights_TK[t, k] * experts[e](x_TD[t])
        rows.append(y)
    return torch.stack(rows) if rows else x_TD.new_zeros(0, width)


def mlp_expert(experts: nn.Module, e: int) -> Expert:
    """Expert `e` of an `MLPExperts`, one token at a time."""
    function = FUNCTIONS[experts.activation]

    def layer(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
        return weight @ x if bias is None else weight @ x + bias

    def run(x: Tensor) -> Tensor:
        w_in, b_in = experts.w_in[e], None if experts.b_in is None else experts.b_in[e]
        if experts.activation == "swiglu":
            gate = layer(w_in[0], None if b_in is None else b_in[0], x)
            hidden = function(gate) * layer(w_in[1], None if b_in is None else b_in[1], x)
        else:
            hidden = function(layer(w_in, b_in, x))
        return layer(experts.w_out[e], None if experts.b_out is None else experts.b_out[e], hidden)

    return run


def all_experts(layer: nn.Module) -> list[Expert]:
    """The experts of a layer, one token at a time each."""
    return [mlp_expert(layer.experts, e) for e in range(layer.num_experts)]


def top_k_by_sorting(row: Sequence[float], k: int) -> list[int]:
    """Ids of the k largest; ties to the lowest id."""
    return sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]


def gradients(output: Tensor, upstream: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of sum(output * upstream); zeros where there is no path."""
    if not output.requires_grad:
        return [torch.zeros_like(t) for t in tensors]
    found = torch.autograd.grad(output, tensors, upstream, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found)]
