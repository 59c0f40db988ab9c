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
from moeflow.schema.engines import zero_stage

_MEND = (
    "fewer experts (model.num_experts) or smaller ones, experts over more processes (parallel.ep), a smaller "
    "data.batch_size, or more trainer.grad_accum"
)
#: How torch words a failed allocation, in lower case.
_SIGNS = ("allocate memory", "not enough memory", "out of memory", "size calculation overflowed")
#: fp32 copies of each parameter that the optimizer keeps beside the value and its gradient.
_MOMENTS = {"adamw": 2, "sgd": 1}


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
    dense, experts = _least_parameters(model, topology)
    layout = topology.layout
    over_dp, over_edp = (_copies(config, layout.size(axis)) if training else 1 for axis in ("dp", "edp"))
    needed = 4 * (dense * over_dp + experts * over_edp)
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


def _copies(config: RunConfig, ranks: int) -> float:
    """fp32 copies of each parameter on a rank while it trains, where `ranks` ranks hold the parameter."""
    moments = _MOMENTS[config.optim.name]
    if config.parallel.engine == "fsdp":
        return max(1.0, (2 + moments) / ranks)  # whole while the model is built, in pieces after that
    if config.parallel.engine == "deepspeed" and zero_stage(config):
        value = 0.5 if config.precision.dtype == "bf16" else 1.0
        return value + (2 + moments) / ranks  # pieces have the value in fp32 once more
    return 2.0 + moments


def _least_parameters(model: nn.Module, topology: Topology) -> tuple[int, int]:
    """Dense and expert parameters on a rank if all were cut as far as the layout allows."""
    experts = sum(parameter.numel() for layer in moe_layers(model).values() for parameter in layer.experts.parameters())
    dense = sum(parameter.numel() for parameter in model.parameters()) - experts
    return dense // topology["tp"].size, experts // (topology["ep"].size * topology["etp"].size)


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
