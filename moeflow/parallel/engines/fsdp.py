"""PyTorch's FSDP2: parameters, gradients and optimizer state are cut over the ranks that hold a parameter.

    dense parameters    cut over dp, a block at a time: gathered for its forward and backward pass, gradients averaged
    expert parameters   are cut over ep already; here over edp too, with gradients summed and divided by dp

Experts are cut along a dimension of their matrices and not along the experts, of which a rank may hold a single one.
Parameters without a dimension that edp divides, all experts where edp is 1, and single numbers stay whole on their
rank, and their gradients are reduced here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from moeflow.moe import Experts
from moeflow.moe.gates import Gate
from moeflow.parallel import collectives, state
from moeflow.parallel.engines.base import (
    Engine,
    OptimizerBuilder,
    Tensors,
    clip_coefficient,
    squares_of,
)
from moeflow.parallel.gradients import reduce_flat
from moeflow.parallel.parallelize import Part
from moeflow.parallel.prepare import one_process_group, prepare_forward
from moeflow.parallel.sharding import global_names
from moeflow.parallel.topology import Group, Topology
from moeflow.schema import RunConfig


class FullySharded(Engine):
    """See the top of the module."""

    def __init__(
        self, config: RunConfig, accelerator: Accelerator, topology: Topology, part: Part, build: OptimizerBuilder
    ):
        super().__init__(config, accelerator, topology, part)
        one_process_group(accelerator.device)
        self.model = part.model
        prepare_forward(accelerator, part.model)
        self._shard(part.model)
        # Those that the optimizer steps; while a module runs, other ones stand in their places.
        self.parameters = dict(part.model.named_parameters())
        self.global_names = global_names(part.model, self.parameters)
        self.optimizer = build(part.model, self._kind)
        if isinstance(self.optimizer, torch.optim.SGD):
            # Of the fused steps DTensor knows Adam's alone.
            for group in self.optimizer.param_groups:
                group.update(fused=False, foreach=True)
        #: Parameters that were not cut, by the axis that their gradients are reduced over.
        self.whole: dict[str, list[nn.Parameter]] = {"dp": [], "edp": []}
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                self.whole[part.sharding[name].data_axis].append(parameter)

    # --- cutting -----------------------------------------------------------------------------------------------------

    def _shard(self, model: nn.Module) -> None:
        """Cut from the inside out: experts, gates, blocks, the rest."""
        device = self.accelerator.device.type
        dense, experts = _mesh(self.topology["dp"], device), _mesh(self.topology["edp"], device)
        low, full = self._policies()
        ignored = {parameter for parameter in model.parameters() if parameter.ndim == 0}
        for module in model.modules():
            if not isinstance(module, Experts) or not list(module.parameters()):
                continue
            whole = {p for p in module.parameters() if self._cut_dim(p) is None}
            if len(whole) < len(list(module.parameters())):
                made = fully_shard(
                    module, mesh=experts, shard_placement_fn=self._placement, mp_policy=low, ignored_params=whole
                )
                made.set_gradient_divide_factor(float(self.topology["dp"].size))
            ignored |= whole
        for module in _inner_units(model, gates=low is not full):
            policy = full if isinstance(module, Gate) else low
            fully_shard(module, mesh=dense, mp_policy=policy, ignored_params=ignored)
        fully_shard(model, mesh=dense, mp_policy=low, ignored_params=ignored)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Other reductions (averages, products) are NCCL's alone.
                module.set_force_sum_reduction_for_comms(True)

    def _policies(self) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
        """Number formats in which parameters are gathered: of most modules, and of gates."""
        full = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.config.precision.dtype != "bf16":
            return full, full
        # Autocast casts the activations, as without FSDP.
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        return low, full

    def _cut_dim(self, parameter: nn.Parameter) -> int | None:
        """Dimension of an expert parameter that is cut over edp; None keeps it whole."""
        edp = self.topology["edp"].size
        return next((d for d in range(1, parameter.ndim) if edp > 1 and parameter.shape[d] % edp == 0), None)

    def _placement(self, parameter: nn.Parameter) -> Shard:
        dim = self._cut_dim(parameter)
        assert dim is not None
        return Shard(dim)

    def _kind(self, name: str, parameter: nn.Parameter) -> str:
        """An optimizer's fused step wants parameters of one mesh together."""
        if not isinstance(parameter, DTensor):
            return "whole"
        return "expert" if self.part.sharding[name].expert else "dense"

    # --- steps -------------------------------------------------------------------------------------------------------

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        self.model.set_is_last_backward(last)  # type: ignore[operator]
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        (loss * self.loss_scale()).backward()

    def step(self) -> tuple[Tensor, bool]:
        topology, device = self.topology, self.accelerator.device
        cut = [p.grad.to_local() for p in self.parameters.values() if isinstance(p.grad, DTensor)]
        grads, squares = list(cut), squares_of(cut, device)
        for axis, parameters in self.whole.items():
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            whole = [p.grad for p in parameters if p.grad is not None]
            reduce_flat(whole, topology[axis], 1.0 / topology["dp"].size)
            grads += whole
            # A piece lies on one rank of dp; what is whole, on as many as its axis has.
            squares = squares + squares_of(whole, device) / topology[axis].size
        norm = collectives.all_reduce(squares, topology["dp"]).sqrt().float()
        taken = math.isfinite(norm.item())
        if taken and self.config.optim.clip_norm is not None:
            torch._foreach_mul_(grads, clip_coefficient(self.config.optim.clip_norm, norm))
        if taken:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, taken

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def tensors(self) -> Tensors:
        found: Tensors = state.persistent_buffers(self.part.model)
        for name, parameter in self.parameters.items():
            found[f"{state.MODEL}/{self.global_names[name]}"] = self._described(name, parameter.detach())
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    full = f"{state.OPTIMIZER}/{self.global_names[name]}/{key}"
                    found[full] = self._described(name, value.detach())
        return found

    def _described(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor with its place in the whole model."""
        if not isinstance(tensor, DTensor):
            return self.placements.describe(name, tensor)
        cut_over_ep = self.part.sharding[name].shards
        if not cut_over_ep:
            return tensor
        (here,) = tensor.placements
        return self.placements.place(name, tensor.to_local(), {"edp": here.dim, **cut_over_ep})  # type: ignore[attr-defined]

    def load(self, read: Callable[[Tensors], None], optimizer: bool) -> None:
        if optimizer:
            state.allocate_optimizer_state(self.optimizer)
        read(self.tensors())


def _inner_units(model: nn.Module, gates: bool) -> Iterator[nn.Module]:
    """What is gathered and freed as one, inner ones first: gates that have a number format of their own, and blocks."""
    if gates:
        yield from (m for m in model.modules() if isinstance(m, Gate) and any(True for _ in m.parameters()))
    for child in model.children():
        if isinstance(child, (nn.ModuleDict, nn.ModuleList)):
            yield from (block for block in child.children() if any(True for _ in block.parameters()))


def _mesh(group: Group, device_type: str) -> DeviceMesh:
    """A mesh of one dimension over the ranks of a group."""
    made = group.process_group or dist.new_group(list(group.ranks), use_local_synchronization=True)
    return DeviceMesh.from_group(made, device_type, mesh_dim_names=(group.name,))
