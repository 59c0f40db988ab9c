"""FastMoE's gates, each on the gate of this library that computes its formula.

All take (d_model, num_expert, world_size, top_k) with `num_expert` experts on this worker, and return (ids [N, top_k],
scores [N, top_k]).  Their losses are not added to anything: the user does, by `get_loss()`.

Departures from FastMoE, each from a defect there: losses of GShard and Switch take the number of all experts and all
tokens; drops follow the order of tokens and not of threads, so they are the same on every run; the noisy and the zero
gate work for any top_k, and the noisy gate in evaluation; capacities count this worker's tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moeflow import ops
from moeflow.compat.fmoe.gates.base_gate import BaseGate
from moeflow.moe.gates import Gate, TopologyGate, build_gate
from moeflow.schema.gate import (
    GShardGateConfig,
    NaiveGateConfig,
    NoisyGateConfig,
    SwipeGateConfig,
    SwitchGateConfig,
    TopologyGateConfig,
    ZeroGateConfig,
)


class _Adapted(BaseGate):
    """Runs a gate of this library, whose linear layer is `self.gate` under FastMoE's name."""

    def __init__(self, d_model: int, num_expert: int, world_size: int, config: Any):
        super().__init__(num_expert, world_size)
        self.d_model, self.top_k = d_model, config.top_k
        inner = build_gate(config, d_model, self.tot_expert)
        # In a tuple: its parameters are this module's already, under the names of FastMoE's checkpoints.
        self._inner: tuple[Gate] = (inner,)
        if hasattr(inner, "proj"):
            self.gate = inner.proj

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route tokens [N, d_model]: (ids [N, top_k] int64, scores [N, top_k])."""
        inner = self._inner[0].train(self.training)
        out = inner(x)
        ids, capacity = out.ids_TK, inner.capacity(x.shape[0])
        if capacity is not None and not inner.limits_itself:
            ids = ops.limit_by_capacity(ids, self.tot_expert, capacity, inner.config.drop_policy, out.weights_TK)
        losses = [coefficient * loss for coefficient, loss in out.losses.values()]
        self.set_loss(torch.stack(losses).sum() if losses else x.new_zeros(1))
        return ids, inner.reweigh(out.weights_TK, ids).to(x.dtype)


class NaiveGate(_Adapted):
    """Top-k of a linear layer; scores are a softmax over the chosen logits; no loss."""

    def __init__(self, d_model: int, num_expert: int, world_size: int, top_k: int = 2, gate_bias: bool = True):
        config = NaiveGateConfig(top_k=top_k, bias=gate_bias, load_balance_coef=0.0)
        super().__init__(d_model, num_expert, world_size, config)

    def forward(self, inp: Tensor, return_all_scores: bool = False) -> Any:
        """Route; with `return_all_scores` also the logits [N, experts in all]."""
        ids, scores = super().forward(inp)
        return (ids, scores, self.gate(inp)) if return_all_scores else (ids, scores)


class _OfNaive(NaiveGate):
    """A gate that FastMoE derives from NaiveGate."""

    def __init__(self, d_model: int, num_expert: int, world_size: int, config: Any):
        _Adapted.__init__(self, d_model, num_expert, world_size, config)


class GShardGate(_OfNaive):
    """Top-2 with capacity (for training, for evaluation), a loss, and a second expert kept by chance in training."""

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 2,
        capacity: tuple[float, float] = (1.2, 2.4),
        random_routing: bool = True,
        gate_bias: bool = True,
    ):
        config = GShardGateConfig(
            top_k=topk,
            bias=gate_bias,
            load_balance_coef=1.0,
            capacity_factor=capacity[0],
            eval_capacity_factor=capacity[1],
            random_second=random_routing,
        )
        super().__init__(d_model, num_expert, world_size, config)


class SwitchGate(_OfNaive):
    """Top-1 with capacity and the Switch loss; noise multiplies the gate's input in training."""

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 1,
        switch_eps: float = 0.1,
        capacity: tuple[float, float] = (1.2, 2.4),
        gate_bias: bool = True,
    ):
        config = SwitchGateConfig(
            top_k=topk,
            bias=gate_bias,
            load_balance_coef=1.0,
            jitter=switch_eps,
            capacity_factor=capacity[0],
            eval_capacity_factor=capacity[1],
        )
        super().__init__(d_model, num_expert, world_size, config)


class SwipeGate(_OfNaive):
    """Choices of full experts move to experts with room; nothing is dropped, and no token has an expert twice."""

    def __init__(self, d_model: int, num_expert: int, world_size: int, top_k: int = 2, gate_bias: bool = True):
        super().__init__(d_model, num_expert, world_size, SwipeGateConfig(top_k=top_k, bias=gate_bias))


class NoisyGate(_Adapted):
    """Noisy top-k with the importance and the load loss."""

    def __init__(self, d_model: int, num_expert: int, world_size: int, top_k: int = 2, gate_bias: bool = False):
        config = NoisyGateConfig(top_k=top_k, bias=gate_bias, importance_coef=1.0, load_coef=1.0)
        super().__init__(d_model, num_expert, world_size, config)
        self.noise: nn.Linear = self._inner[0].noise  # type: ignore[assignment]
        self.register_load_state_dict_pre_hook(_noisy_names)


def _noisy_names(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """FastMoE keeps both matrices as parameters [d_model, experts]."""
    for old, new in (("w_gate", "gate.weight"), ("w_noise", "noise.weight")):
        if prefix + old in state:
            state[prefix + new] = state.pop(prefix + old).t()


class ZeroGate(_Adapted):
    """All tokens to the first experts, in equal parts: for measuring."""

    def __init__(self, d_model: int, num_expert: int, world_size: int, top_k: int = 2):
        super().__init__(d_model, num_expert, world_size, ZeroGateConfig(top_k=top_k))


class FasterGate(_OfNaive):
    """Limits the share of choices that leave the node, FMOE_TOPO_OUTGOING_FRACTION (0.14).

    A node is FMOE_TOPO_GPUS_PER_NODE (8) workers.  The limit holds over all choices; FasterMoE limits one slot alone.

    Args:
        node_rank: of this worker.
    """

    def __init__(
        self, d_model: int, num_expert: int, world_size: int, node_rank: int, top_k: int = 2, gate_bias: bool = True
    ):
        share = float(os.environ.get("FMOE_TOPO_OUTGOING_FRACTION", "0.14"))
        config = TopologyGateConfig(top_k=top_k, bias=gate_bias, outgoing_share=share, load_balance_coef=1.0)
        super().__init__(d_model, num_expert, world_size, config)
        per_node = num_expert * int(os.environ.get("FMOE_TOPO_GPUS_PER_NODE", "8"))
        inner = self._inner[0]
        assert isinstance(inner, TopologyGate)
        inner.place([expert // per_node for expert in range(self.tot_expert)], node_rank)

    def forward(self, inp: Tensor, return_all_scores: bool = False) -> Any:
        self._inner[0].to(inp.device)
        return super().forward(inp, return_all_scores)


def gen_faster_gate(rank: int) -> Callable[..., FasterGate]:
    """A gate class for the worker of this rank, to pass as `gate=`."""
    node_rank = rank // int(os.environ.get("FMOE_TOPO_GPUS_PER_NODE", "8"))

    def build(d_model: int, num_expert: int, world_size: int, top_k: int = 2) -> FasterGate:
        return FasterGate(d_model, num_expert, world_size, node_rank, top_k)

    return build


__all__ = [
    "BaseGate",
    "FasterGate",
    "GShardGate",
    "NaiveGate",
    "NoisyGate",
    "SwipeGate",
    "SwitchGate",
    "ZeroGate",
    "gen_faster_gate",
]
