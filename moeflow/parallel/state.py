"""Names and placements of this rank's tensors, as a checkpoint needs them.

A tensor that is spread over ranks is described by a DTensor (on a mesh of its groups, with its placements), so that
torch.distributed.checkpoint can write it once and read it back on any other layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from moeflow.parallel.sharding import ParameterSharding, Sharding, global_names
from moeflow.parallel.topology import Topology
from moeflow.schema.layout import EXPERT_AXES

MODEL, OPTIMIZER = "model", "optimizer"


class Placements:
    """Describes tensors that have the shape of a parameter.

    Args:
        topology: of this rank.
        sharding: of the parameters, by name.
        full_shapes: shape of each parameter as a process alone would hold it.
    """

    def __init__(self, topology: Topology, sharding: Sharding, full_shapes: Mapping[str, torch.Size]):
        self.topology, self.sharding, self.full_shapes = topology, sharding, full_shapes
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}

    def describe(self, parameter_name: str, tensor: Tensor) -> Tensor:
        """Return `tensor`, as a DTensor if the parameter is spread over ranks and the tensor has its shape."""
        shards = self.sharding[parameter_name].shards
        return tensor if not shards or tensor.ndim == 0 else self.place(parameter_name, tensor, shards)

    def place(self, parameter_name: str, tensor: Tensor, shards: Mapping[str, int]) -> DTensor:
        """Return this rank's part of a parameter-shaped tensor as a DTensor; `shards` maps axes to dimensions."""
        axes = self._axes(self.sharding[parameter_name])
        placements: list[Placement] = [Shard(shards[a]) if a in shards else Replicate() for a in axes]
        shape = self.full_shapes[parameter_name]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(tensor, self._mesh(axes), placements, run_check=False, shape=shape, stride=stride)

    def _axes(self, sharding: ParameterSharding) -> tuple[str, ...]:
        """Axes of the stage's grid that have more than one rank."""
        grid = EXPERT_AXES[1:] if sharding.expert else ("dp", "tp")
        return tuple(axis for axis in grid if self.topology[axis].size > 1)

    def _mesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        if axes not in self._meshes:
            layout, rank = self.topology.layout, self.topology.rank
            stage = torch.tensor(list(layout.stage_group(rank))).view([layout.size(a) for a in axes])
            groups: Any = [self.topology[axis].process_group for axis in axes]
            device = "cuda" if torch.cuda.is_available() and torch.distributed.get_backend() == "nccl" else "cpu"
            self._meshes[axes] = DeviceMesh.from_group(
                groups if len(axes) > 1 else groups[0],
                device,
                mesh=stage if len(axes) > 1 else None,
                mesh_dim_names=axes,
            )
        return self._meshes[axes]


def model_tensors(model: nn.Module, placements: Placements) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank's part: "model/NAME" -> tensor that shares its memory."""
    named = dict(model.named_parameters())
    names = global_names(model, named)
    state = {f"{MODEL}/{names[name]}": placements.describe(name, p.detach()) for name, p in named.items()}
    return {**state, **persistent_buffers(model)}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a state dict holds: "model/NAME" -> the buffer."""
    state: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                state[f"{MODEL}/{prefix}.{key}" if prefix else f"{MODEL}/{key}"] = buffer
    return state


def optimizer_tensors(model: nn.Module, optimizer: Optimizer, placements: Placements) -> dict[str, Tensor]:
    """State of the optimizer by parameter: "optimizer/NAME/KEY" -> tensor that shares its memory."""
    state: dict[str, Tensor] = {}
    named = dict(model.named_parameters())
    names = global_names(model, named)
    for name, parameter in named.items():
        entries: Mapping[str, Tensor] = optimizer.state.get(parameter, {})
        for key, value in entries.items():
            if isinstance(value, Tensor):
                state[f"{OPTIMIZER}/{names[name]}/{key}"] = placements.describe(name, value)
    return state


def allocate_optimizer_state(optimizer: Optimizer) -> None:
    """Make the optimizer allocate its state, without moving a parameter: a step on zero gradients at learning rate 0.

    A checkpoint can then be read into it.  Must be followed by reading one: counters of steps stand at 1.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
