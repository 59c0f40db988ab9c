"""Accelerate's door: launch environment, device, precision and gradient accumulation.

Gradients are reduced by `moeflow.parallel.gradients` and not by DistributedDataParallel, which would average the
experts of different ranks and broadcast rank 0's over them.  So the model is prepared for its precision only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.optim import Optimizer

from moeflow.errors import ConfigError, LaunchError
from moeflow.parallel.rendezvous import rejoin
from moeflow.schema import RunConfig

#: How gloo words that it could not connect; it has no exception of its own.
_NOT_MET = ("connectFullMesh", "Connection refused", "timed out", "Timed out")
_MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def make_accelerator(config: RunConfig) -> Accelerator:
    """Build the Accelerator of this process; joins the process group when a launcher's variables are there.

    Raises:
        ConfigError: the device or the precision is not to be had here.
    """
    use_cpu = config.launch.device == "cpu" or (config.launch.device == "auto" and not torch.cuda.is_available())
    if config.launch.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("launch.device=cuda: no CUDA device is visible to torch", "launch.device=cpu")
    if config.precision.dtype == "fp16" and use_cpu:
        raise ConfigError("precision=fp16: CPUs train in fp32 or bf16", "precision=bf16")
    timeout = timedelta(seconds=config.launch.timeout_s)
    rejoin("gloo" if use_cpu else "nccl", timeout)
    return Accelerator(
        cpu=use_cpu,
        mixed_precision=_MIXED[config.precision.dtype],
        # A pipeline accumulates inside its schedule.
        gradient_accumulation_steps=config.trainer.grad_accum if config.parallel.pp == 1 else 1,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )


@contextlib.contextmanager
def meeting(timeout_s: float) -> Iterator[None]:
    """Name the failure of ranks that do not find one another while they join, inside the block.

    Raises:
        LaunchError: they did not.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and not any(sign in text for sign in _NOT_MET):
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"the ranks did not find one another at {where} within launch.timeout_s={timeout_s:g}: "
            f"{text.splitlines()[0][:200]}",
            "moeflow doctor tries what they need; docs/launching.md lists the usual causes; a larger launch.timeout_s",
        ) from error


def prepare(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Give the model its autocast and the optimizer its accumulation and gradient scaler."""
    return prepare_forward(accelerator, model), accelerator.prepare_optimizer(optimizer, device_placement=False)


def prepare_forward(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Give the model its autocast."""
    return accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)


def one_process_group(device: torch.device) -> None:
    """Make a process group of one, for libraries that cannot do without; nothing where there is a group already."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def leave() -> None:
    """Leave the process group, if there is one, so that the process may end without warnings."""
    if dist.is_initialized():
        dist.destroy_process_group()


def loss_scale(accelerator: Accelerator) -> float:
    """What Accelerate multiplies the loss by before backward: 1 / accumulation steps, times the gradient scaler's."""
    scale = 1.0 / accelerator.gradient_accumulation_steps
    scaler = accelerator.scaler
    return scale if scaler is None else scale * scaler.get_scale()


def share_overflow(accelerator: Accelerator, optimizer: AcceleratedOptimizer, norm: torch.Tensor) -> None:
    """Let every rank skip an fp16 step if any rank's gradients overflowed.

    Torch's scaler looks at this rank's gradients only, and with experts on other ranks the ranks would part.  The
    global norm is infinite or nan on all of them alike.
    """
    if accelerator.scaler is None:
        return
    state = accelerator.scaler._per_optimizer_states[id(optimizer.optimizer)]
    for found in state["found_inf_per_device"].values():
        found.fill_(0.0 if torch.isfinite(norm) else 1.0)
