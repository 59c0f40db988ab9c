"""From a model built as if it were alone to this rank's part of it.

The model comes without values (on the meta device).  Its MoE layers get their share of the experts and a dispatcher,
then memory is allocated for what stays here, and initial values are drawn: the same ones on every layout.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from moeflow.errors import ConfigError
from moeflow.models.init import initialize
from moeflow.moe import Experts, MoELayer
from moeflow.parallel import collectives
from moeflow.parallel.dispatcher import AllToAllDispatcher
from moeflow.parallel.topology import Topology
from moeflow.schema.layout import divisors


def moe_layers(model: nn.Module) -> dict[str, MoELayer]:
    """MoE layers of a model by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def expert_parameter_names(model: nn.Module) -> set[str]:
    """Names of the parameters that belong to experts, which each expert-parallel rank has its own of."""
    return {
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if isinstance(module, Experts)
        for parameter, _ in module.named_parameters()
    }


def parallelize(model: nn.Module, topology: Topology, seed: int, device: torch.device) -> nn.Module:
    """Make `model` this rank's part of the whole, with initial values, in place.

    Args:
        model: built under `torch.device("meta")`.
        topology: of this rank.
        seed: `run.seed`; with the parameters' global names it decides the initial values.
        device: where the part lives.

    Returns:
        `model`.

    Raises:
        ConfigError: the experts do not divide over the ranks.
    """
    for layer in moe_layers(model).values():
        _distribute_experts(layer, topology)
    materialize(model)
    initialize(model, seed)
    return model.to(device)


def _distribute_experts(layer: MoELayer, topology: Topology) -> None:
    ep, etp = topology["ep"], topology["etp"]
    if layer.num_experts % ep.size:
        valid = ", ".join(map(str, divisors(layer.num_experts)))
        raise ConfigError(
            f"parallel.ep={ep.size} does not divide model.num_experts={layer.num_experts}; valid: {valid}",
            f"model.num_experts={-(-layer.num_experts // ep.size) * ep.size}",
        )
    layer.experts.shard(ep.rank, ep.size, etp.rank, etp.size)
    if ep.size > 1:
        layer.dispatcher = AllToAllDispatcher(ep)
    layer.gate.batch_mean = partial(collectives.batch_mean, group=topology["stage"])


@torch.no_grad()
def materialize(model: nn.Module) -> None:
    """Give every parameter and buffer that is on the meta device memory on the CPU, without values.

    A parameter used in two places stays one parameter.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device="cpu")
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
