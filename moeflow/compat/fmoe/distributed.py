"""FastMoE's data parallelism by named groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from moeflow.errors import ConfigError
from moeflow.parallel import collectives
from moeflow.parallel.topology import Group, group_of

_DEFAULTS = ("dp", "gate", "moe", "world")


class DistributedGroupedDataParallel(nn.Module):
    """Reduces the gradients of each parameter over the group that its `dp_comm` names.

    A parameter without a mark is reduced over "dp".  "none", or a name that no group was given for, is neither
    broadcast nor reduced: such experts live on this worker alone, and have seen the tokens of all workers.  FastMoE
    leaves their gradient a sum over workers where all others are means, so experts learn faster the more workers there
    are; here it is divided by the size of the dp group, so that any number of workers takes the same step.

    A gradient that only some workers have counts as zero on the others.  (In FastMoE the job hangs.)

    Args:
        module: the model.
        auto_allreduce: not supported, as in FastMoE: call `allreduce_gradients()` after `backward()`.
        need_sync: whether parameters are made equal to those of each group's first worker now.
        groups: process group NAME_group for each name; "dp", "gate", "moe" and "world" are the world otherwise.
    """

    def __init__(self, module: nn.Module, auto_allreduce: bool = False, need_sync: bool = True, **groups: Any):
        super().__init__()
        if auto_allreduce:
            raise ConfigError(
                "auto_allreduce=True: gradients are reduced by hand", "call allreduce_gradients() after backward()"
            )
        unknown = [name for name in groups if not name.endswith("_group")]
        if unknown:
            raise ConfigError(f"{unknown[0]}: no such argument; groups are named NAME_group", "dp_group=...")
        self.module = module
        self.comms: dict[str, Group] = {name: group_of(None, name) for name in _DEFAULTS}
        for name, process_group in groups.items():
            name = name.removesuffix("_group")
            self.comms[name] = group_of(process_group, name)
        if need_sync:
            self._sync_params()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def allreduce_gradients(
        self, no_scale: bool = False, reduce_after: bool = False, fp32_allreduce: bool = False
    ) -> None:
        """Average the gradients within their groups; to be called after `backward()`, on every worker.

        Args:
            no_scale: sum instead.
            reduce_after: divide after the sum and not before.
            fp32_allreduce: sum in fp32.
        """
        for group, parameters in self._by_group():
            grads = [_gradient(parameter) for parameter in parameters]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            scale = 1.0 if no_scale else 1.0 / group.size
            total = flat.float() if fp32_allreduce else flat
            if not reduce_after:
                total = total * scale
            total = collectives.all_reduce(total, group)
            if reduce_after:
                total = total * scale
            _unflatten(total, grads)
        if not no_scale:
            for parameter in self._alone():
                if parameter.grad is not None:
                    parameter.grad /= self.comms["dp"].size

    allreduce_params = allreduce_gradients

    @torch.no_grad()
    def _sync_params(self) -> None:
        for group, parameters in self._by_group():
            values = [parameter.data for parameter in parameters]
            _unflatten(collectives.broadcast(torch.cat([value.reshape(-1) for value in values]), group), values)

    def _by_group(self) -> Iterator[tuple[Group, list[nn.Parameter]]]:
        """Trainable parameters by group and dtype, in one order on all workers."""
        marked = [(_comm(p), str(p.dtype), p) for p in self.module.parameters() if p.requires_grad]
        known = sorted((each for each in marked if each[0] in self.comms), key=lambda each: each[:2])
        for (name, _), members in groupby(known, key=lambda each: each[:2]):
            if self.comms[name].size > 1:
                yield self.comms[name], [parameter for _, _, parameter in members]

    def _alone(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad and _comm(p) not in self.comms]


def _comm(parameter: nn.Parameter) -> str:
    return getattr(parameter, "dp_comm", "dp")


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _unflatten(flat: Tensor, tensors: list[Tensor]) -> None:
    for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(part.view_as(tensor))
