"""From a model built as if it were alone to this rank's part of it.

The model comes without values (on the meta device).  Its MoE layers get their share of the experts and a dispatcher;
then, one leaf module at a time, memory is allocated, initial values are drawn (the same ones on every layout), and what
tensor parallelism cuts is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from moeflow.errors import ConfigError
from moeflow.models.init import initialize_module
from moeflow.moe import MoELayer
from moeflow.parallel import collectives
from moeflow.parallel.dispatcher import RankDispatcher
from moeflow.parallel.nodes import place_topology_gate
from moeflow.parallel.shapes import agree_on_shapes
from moeflow.parallel.sharding import Sharding, describe_sharding
from moeflow.parallel.tensor import connect_regions, cut_leaf, cut_plan
from moeflow.parallel.topology import Group, Topology
from moeflow.schema.layout import divisors


@dataclass(frozen=True)
class Part:
    """This rank's part of a model.

    Attributes:
        model: the part.
        sharding: of its parameters.
        full_shapes: shape of each of its parameters as a process alone would hold it.
    """

    model: nn.Module
    sharding: Sharding
    full_shapes: dict[str, torch.Size]


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """MoE layers of a model by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def parallelize(
    model: nn.Module, topology: Topology, seed: int, device: torch.device, sequence_parallel: bool = False
) -> Part:
    """Make `model` this rank's part of the whole, with initial values, in place.

    Args:
        model: built under `torch.device("meta")`.
        topology: of this rank.
        seed: `run.seed`; with the parameters' global names it decides the initial values.
        device: where the part lives.
        sequence_parallel: cut the activations between tensor-parallel regions along the sequence.

    Raises:
        ConfigError: a size does not divide over the ranks.
        CollectiveError: the ranks of a stage were given different models.
    """
    full_shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    agree_on_shapes(full_shapes, topology["stage"])
    plan = cut_plan(model, topology["tp"])
    sequence_parallel = sequence_parallel and topology["tp"].size > 1
    for layer in moe_layers(model).values():
        _distribute_experts(layer, topology, sequence_parallel)
    _materialize_leaves(model, seed, plan, topology["tp"])
    for layer in moe_layers(model).values():
        place_topology_gate(layer, topology["ep"], device)
    connect_regions(model, topology["tp"], sequence_parallel)
    sharding = describe_sharding(model, topology, sequence_parallel)
    return Part(model.to(device), sharding, full_shapes)


def _distribute_experts(layer: MoELayer, topology: Topology, sequence_parallel: bool) -> None:
    ep, etp, tp = topology["ep"], topology["etp"], topology["tp"]
    if layer.num_experts % ep.size:
        valid = ", ".join(map(str, divisors(layer.num_experts)))
        raise ConfigError(
            f"parallel.ep={ep.size} does not divide model.num_experts={layer.num_experts}; valid: {valid}",
            f"model.num_experts={-(-layer.num_experts // ep.size) * ep.size}",
        )
    layer.experts.shard(ep.rank, ep.size, etp.rank, etp.size)
    if max(ep.size, etp.size, tp.size) > 1:
        layer.dispatcher = RankDispatcher(topology, sequence_parallel)
    layer.gate.batch_mean = partial(collectives.batch_mean, group=topology["stage"])
    layer.gate.sequence_mean = partial(collectives.batch_mean, group=tp)


def _materialize_leaves(model: nn.Module, seed: int, plan: dict[str, dict[str, int]], tp: Group) -> None:
    """Give every module its memory and values; a module that is cut is whole for a moment only.

    A parameter that two modules share stays one parameter: the first of them draws it.
    """
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        shared = {key: made[id(p)] for key, p in module._parameters.items() if p is not None and id(p) in made}
        originals = {key: id(p) for key, p in module._parameters.items() if p is not None}
        if originals or module._buffers or hasattr(module, "init_parameters"):
            materialize(module)
            initialize_module(module, seed, name)
            if name in plan:
                cut_leaf(module, plan[name], tp)
        for key, parameter in shared.items():
            setattr(module, key, parameter)
        made.update({number: module._parameters[key] for key, number in originals.items()})


@torch.no_grad()
def materialize(module: nn.Module) -> None:
    """Give the module's own parameters and buffers that are on the meta device memory on the CPU, without values."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and parameter.is_meta:
            empty = torch.empty_like(parameter, device="cpu")
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
