"""What the trainer asks of an engine: who owns gradients and optimizer state.

An engine prepares the model and its optimizer, runs the backward pass, reduces, clips and steps, and gives a checkpoint
its tensors under global names in fp32, so that what one engine saved another one reads.  All of them do the same
mathematics, that of `moeflow.parallel.gradients`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from moeflow.parallel.parallelize import Part
from moeflow.parallel.prepare import loss_scale
from moeflow.parallel.state import Placements
from moeflow.parallel.topology import Topology
from moeflow.schema import RunConfig

Tensors = dict[str, Tensor]
Split = Callable[[str, nn.Parameter], Hashable]


class OptimizerBuilder(Protocol):
    """Makes torch's optimizer of a model; parameters that `split` tells apart go to groups of their own."""

    def __call__(self, model: nn.Module, split: Split) -> Optimizer: ...


class Engine(ABC):
    """One process's gradients and optimizer state.

    Args:
        config: the frozen configuration.
        accelerator: device and precision.
        topology: of this rank.
        part: this rank's part of the model.

    Attributes:
        model: what the forward pass of training calls.
        optimizer: torch's own optimizer; its groups hold the learning rate.
    """

    model: nn.Module
    optimizer: Optimizer

    def __init__(self, config: RunConfig, accelerator: Accelerator, topology: Topology, part: Part):
        self.config, self.accelerator, self.topology, self.part = config, accelerator, topology, part
        self.placements = Placements(topology, part.sharding, part.full_shapes)

    def loss_scale(self) -> float:
        """What the loss of one micro-batch is multiplied by before backward."""
        return loss_scale(self.accelerator)

    @abstractmethod
    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one micro-batch of a step."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Backward of the mean loss of one micro-batch; scales it by `loss_scale`."""

    @abstractmethod
    def step(self) -> tuple[Tensor, bool]:
        """Reduce the gradients over the ranks, clip them, step, and forget them; collective.

        Returns:
            The norm of the whole gradient before clipping (float32, 0-dim, the same on all ranks), and whether the step
            was taken.  Where the norm is not finite it is not: parameters and optimizer state stay as they were.
        """

    @abstractmethod
    def tensors(self) -> Tensors:
        """Parameters, buffers and optimizer state by global name, in fp32; collective."""

    @abstractmethod
    def load(self, read: Callable[[Tensors], None], optimizer: bool) -> None:
        """Take them back; collective.

        Args:
            read: fills the tensors it is given from a checkpoint.
            optimizer: whether its state is to be read too, or starts anew.
        """


def each_parameter(part: Part) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters of a part by name."""
    return ((name, p) for name, p in part.model.named_parameters() if p.requires_grad)


def clip_coefficient(max_norm: float, norm: Tensor) -> Tensor:
    """What all gradients are multiplied by: min(1, max_norm / norm)."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def squares_of(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all values, float64, so that it does not depend on how they are cut."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
