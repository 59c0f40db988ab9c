"""Optimizer and learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import torch
from torch import nn
from torch.optim import Optimizer

from moeflow.schema import OptimConfig, ScheduleConfig

_BIASES = ("bias", "b_in", "b_out")


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices and convolutions, not to biases and scales.

    Stacked biases have two dimensions, so the name decides for them.
    """
    return parameter.ndim > 1 and name.rpartition(".")[2] not in _BIASES


def build_optimizer(
    model: nn.Module, config: OptimConfig, split: Callable[[str, nn.Parameter], Hashable] = lambda name, parameter: None
) -> Optimizer:
    """Build the optimizer of this rank's parameters.

    Args:
        model: this rank's part.
        config: kind and settings.
        split: parameters for which it gives different values go to groups of their own.
    """
    kinds: dict[tuple[bool, Hashable], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kinds.setdefault((decays(name, parameter), split(name, parameter)), []).append(parameter)
    # Those that decay first.
    groups = [
        {"params": parameters, "weight_decay": config.weight_decay if decaying else 0.0}
        for decaying in (True, False)
        for kind, parameters in kinds.items()
        if kind[0] is decaying
    ]
    if config.name == "adamw":
        first, second = config.betas
        return torch.optim.AdamW(groups, lr=config.lr, betas=(first, second), eps=config.eps, fused=True)
    assert config.name == "sgd", config.name
    nesterov = config.nesterov and config.momentum > 0
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=True)


def learning_rate(step: int, peak: float, config: ScheduleConfig, max_steps: int) -> float:
    """Learning rate of a step: a pure function, so that a resumed run needs no state of a scheduler.

    Args:
        step: steps done before this one, from 0.
        peak: `optim.lr`.
        config: the shape; its `total_steps` replaces `max_steps` where given.
        max_steps: `trainer.max_steps`.
    """
    total = config.total_steps or max_steps
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.name == "constant":
        return peak
    progress = min(1.0, (step - config.warmup_steps) / max(total - config.warmup_steps, 1))
    left = 1.0 - progress if config.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (config.min_ratio + (1.0 - config.min_ratio) * left)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Give every parameter group the rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
