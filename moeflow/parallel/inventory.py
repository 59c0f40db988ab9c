"""What each rank of a layout holds, counted from the model's shapes: no processes, no memory for values.

Ranks of one pipeline stage and one tp coordinate hold equally much, so that counting does not grow with the number of
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from moeflow.errors import ConfigError
from moeflow.parallel.parallelize import moe_layers
from moeflow.parallel.pipeline import StageRange, stage_ranges
from moeflow.parallel.regions import part_bounds
from moeflow.parallel.sharding import describe_experts
from moeflow.parallel.tensor import cut_plan
from moeflow.parallel.topology import Topology
from moeflow.schema.layout import Layout, divisors
from moeflow.schema.parallel import ParallelConfig

# fp32 bytes of one parameter: value, gradient, and AdamW's two moments.
PARAMETER_BYTES, TRAINING_BYTES = 4, 16


@dataclass(frozen=True)
class Holding:
    """What one rank holds.

    Attributes:
        pp_rank: pipeline coordinate.
        tp_rank: tensor-parallel coordinate.
        layers: names of the layers, empty where the model has no pipeline.
        dense: parameters outside the experts.
        experts: expert parameters.
        local_experts: experts of each MoE layer here.
        moe_layers: MoE layers here.
    """

    pp_rank: int
    tp_rank: int
    layers: tuple[str, ...]
    dense: int
    experts: int
    local_experts: int
    moe_layers: int

    @property
    def parameters(self) -> int:
        """All parameters of the rank."""
        return self.dense + self.experts

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the fp32 parameters."""
        return self.parameters * PARAMETER_BYTES

    @property
    def training_bytes(self) -> int:
        """Bytes of parameters, gradients and AdamW's moments, all fp32; activations come on top."""
        return self.parameters * TRAINING_BYTES


def take_stock(model: nn.Module, layout: Layout, config: ParallelConfig) -> list[Holding]:
    """Count what the ranks hold: one entry for each pair of pipeline and tp coordinate.

    Args:
        model: built on the meta device.
        layout: sizes of the axes.
        config: schedule and split of the pipeline.

    Raises:
        ConfigError: the model does not divide over the layout.
    """
    ranges = stage_ranges(model, config) if layout.pp > 1 else []
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    layers = moe_layers(model)
    experts = {
        f"{name}.experts.{parameter}": sharding
        for name, layer in layers.items()
        for parameter, sharding in describe_experts(layer.experts, layout.ep, layout.etp).items()
    }
    for layer in layers.values():
        if layer.num_experts % layout.ep:
            valid = ", ".join(map(str, divisors(layer.num_experts)))
            raise ConfigError(
                f"parallel.ep={layout.ep} does not divide model.num_experts={layer.num_experts}; valid: {valid}",
                f"model.num_experts={-(-layer.num_experts // layout.ep) * layout.ep}",
            )
    holdings = []
    for pp_rank in range(layout.pp):
        own = [stage for stage in ranges if stage.index % layout.pp == pp_rank]
        here = [name for name in shapes if not ranges or _belongs(name, own)]
        tied = _second_copies(model, own) if ranges else []
        for tp_rank in range(layout.tp):
            cut = cut_plan(model, Topology.imagined(layout, tp_rank)["tp"])
            dense = sum(
                _cut_size(shapes[source], cut, name, Topology.imagined(layout, tp_rank))
                for name, source in [*((n, n) for n in here if n not in experts), *tied]
            )
            held = sum(_expert_size(shapes[name], experts[name].shards, layout) for name in here if name in experts)
            own_layers = [name for name in layers if not ranges or _belongs(name + ".", own)]
            holdings.append(
                Holding(
                    pp_rank,
                    tp_rank,
                    tuple(layer for stage in own for layer in stage.layers),
                    dense,
                    held,
                    layers[own_layers[0]].num_experts // layout.ep if own_layers else 0,
                    len(own_layers),
                )
            )
    return holdings


def _belongs(name: str, stages: list[StageRange]) -> bool:
    """Whether a parameter belongs to one of the stages: blocks by their name, the ends by their side."""
    parts = name.split(".")
    if parts[0] == "blocks":
        return any(parts[1] in stage.layers for stage in stages)
    return any(stage.first if parts[0] == "embed" else stage.last for stage in stages)


def _second_copies(model: nn.Module, stages: list[StageRange]) -> list[tuple[str, str]]:
    """(name, name of the original) of shared parameters whose original is on another stage."""
    return [
        (alias, original)
        for alias, original in getattr(model, "tied", {}).items()
        if _belongs(alias, stages) and not _belongs(original, stages)
    ]


def _cut_size(shape: tuple[int, ...], plan: dict[str, dict[str, int]], name: str, topology: Topology) -> int:
    module, _, parameter = name.rpartition(".")
    dim = plan.get(module, {}).get(parameter)
    if dim is None:
        return math.prod(shape)
    lo, hi = part_bounds(shape[dim], topology["tp"])
    return math.prod(shape) // shape[dim] * (hi - lo)


def _expert_size(shape: tuple[int, ...], shards: Mapping[str, int], layout: Layout) -> int:
    size = math.prod(shape)
    for axis in shards:
        size //= layout.size(axis)
    return size
