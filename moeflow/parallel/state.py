"""Names and placements of this rank's tensors, as a checkpoint needs them.

A tensor that is spread over ranks is described by a DTensor (on a mesh of its groups, with its placements), so that
torch.distributed.checkpoint can write it once and read it back on any other layout.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from moeflow.parallel.parallelize import expert_parameter_names
from moeflow.parallel.topology import Topology

MODEL, OPTIMIZER = "model", "optimizer"


class Placements:
    """Describes tensors that have the shape of a parameter.

    Args:
        model: this rank's part.
        topology: of this rank.
    """

    def __init__(self, model: nn.Module, topology: Topology):
        self.topology = topology
        self.experts = expert_parameter_names(model)
        self._mesh = self._expert_mesh() if topology["ep"].size > 1 else None

    def _expert_mesh(self) -> DeviceMesh:
        layout, rank = self.topology.layout, self.topology.rank
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
        ep = self.topology["ep"]
        if layout.edp == 1:
            return DeviceMesh.from_group(ep.process_group, device.type, mesh_dim_names=("ep",))
        stage = torch.tensor(list(layout.stage_group(rank))).view(layout.edp, layout.ep, layout.etp)
        groups = [self.topology["edp"].process_group, ep.process_group]
        mesh = stage[:, :, layout.coordinate(rank, "etp")].contiguous()
        return DeviceMesh.from_group(groups, device.type, mesh=mesh, mesh_dim_names=("edp", "ep"))

    def describe(self, parameter_name: str, tensor: Tensor) -> Tensor:
        """Return `tensor`, as a DTensor if the parameter is spread over ranks and the tensor has its shape."""
        if self._mesh is None or parameter_name not in self.experts or tensor.ndim == 0:
            return tensor
        placements: list[Placement] = [Shard(0)] if self._mesh.ndim == 1 else [Replicate(), Shard(0)]
        return DTensor.from_local(tensor, self._mesh, placements, run_check=False)


def model_tensors(model: nn.Module, placements: Placements) -> dict[str, Tensor]:
    """Parameters and persistent buffers of this rank's part: "model/NAME" -> tensor that shares its memory."""
    state = {f"{MODEL}/{name}": placements.describe(name, p.detach()) for name, p in model.named_parameters()}
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in persistent:
            state[f"{MODEL}/{name}"] = buffer
    return state


def optimizer_tensors(model: nn.Module, optimizer: Optimizer, placements: Placements) -> dict[str, Tensor]:
    """State of the optimizer by parameter: "optimizer/NAME/KEY" -> tensor that shares its memory."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        entries: Mapping[str, Tensor] = optimizer.state.get(parameter, {})
        for key, value in entries.items():
            if isinstance(value, Tensor):
                state[f"{OPTIMIZER}/{name}/{key}"] = placements.describe(name, value)
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
