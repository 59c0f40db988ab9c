"""Memory that a run cannot do without: told beforehand where it is plain, and named where it ran out."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import psutil
import torch
from torch import nn

from moeflow.errors import ResourceError
from moeflow.parallel.parallelize import moe_layers
from moeflow.parallel.topology import Topology
from moeflow.schema import RunConfig

_MEND = (
    "fewer experts (model.num_experts) or smaller ones, experts over more processes (parallel.ep), a smaller "
    "data.batch_size, or more trainer.grad_accum"
)
#: How torch words a failed allocation, in lower case.
_SIGNS = ("allocate memory", "not enough memory", "out of memory", "size calculation overflowed")
#: fp32 copies of each parameter that training keeps: the value, its gradient, the optimizer's moments.
_COPIES = {"adamw": 4, "sgd": 3}


def check_room(model: nn.Module, config: RunConfig, topology: Topology, device: torch.device, training: bool) -> None:
    """Refuse a model whose parameters alone cannot fit, before the system ends the process without a word.

    A lower bound: activations and buffers come on top.

    Args:
        model: this rank's layers, whole, on the meta device.
        config: of the run.
        topology: of this rank.
        device: that the model will be on.
        training: gradients and optimizer state are needed too.

    Raises:
        ResourceError: gives both numbers.
    """
    copies = _COPIES[config.optim.name] if training else 1
    needed = 4 * copies * _least_parameters(model, topology)
    room, where = _room(device)
    if device.type == "cpu":
        # All ranks of this machine draw on it.
        needed *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if needed > room:
        raise ResourceError(
            f"parameters{', gradients and optimizer state' * training} of this model (model.num_experts="
            f"{config.model.num_experts}) take at least {needed / 2**30:,.1f} GiB, and {where} has "
            f"{room / 2**30:,.1f} GiB free",
            _MEND,
        )


def _least_parameters(model: nn.Module, topology: Topology) -> int:
    """Parameters on a rank if all were cut as far as the layout allows."""
    experts = sum(parameter.numel() for layer in moe_layers(model).values() for parameter in layer.experts.parameters())
    dense = sum(parameter.numel() for parameter in model.parameters()) - experts
    return experts // (topology["ep"].size * topology["etp"].size) + dense // topology["tp"].size


def _room(device: torch.device) -> tuple[int, str]:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    return psutil.virtual_memory().available + psutil.swap_memory().free, "this machine"


@contextlib.contextmanager
def shortage_named() -> Iterator[None]:
    """Turn a failed allocation inside the block into one short error.

    Raises:
        ResourceError: memory ran out.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not any(
            sign in text.lower() for sign in _SIGNS
        ):
            raise
        raise ResourceError(
            f"memory ran out: {text.splitlines()[0] if text else 'allocation failed'}", _MEND
        ) from error
