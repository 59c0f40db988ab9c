"""Pipeline parallelism with torch.distributed.pipelining.

A model that can be cut offers (see `moeflow.models.transformer.GPT`):

    blocks                         nn.ModuleDict of its layers, keyed by their number in the whole model
    stage_costs()                  costs of the layers, and what the first and the last stage have beside them
    keep(layers)                   takes the parts of other stages away
    run(inputs, layers)            runs some of the layers, with the ends that belong to them
    boundary_shape(batch, length)  shape of what one stage sends to the next

Each rank keeps one model object with the layers of all its stages, under their global names, so that parameters,
checkpoints and gradients do not know of stages.  Interleaved schedules give a rank several stages: stage i stands on
rank i mod pp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from moeflow.errors import ConfigError
from moeflow.parallel import collectives
from moeflow.parallel.topology import Topology
from moeflow.parallel.watch import watched
from moeflow.plan.partition import partition
from moeflow.schema.parallel import ParallelConfig

Autocast = Callable[[], AbstractContextManager]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StageRange:
    """Layers of one stage.

    Attributes:
        index: number of the stage.
        layers: names of its layers.
        first: whether it is the first stage of the model.
        last: whether it is the last.
    """

    index: int
    layers: tuple[str, ...]
    first: bool
    last: bool


def stage_ranges(model: Any, config: ParallelConfig) -> list[StageRange]:
    """Cut the model's layers into stages: pp of them, or pp * pp_virtual with an interleaved schedule.

    Raises:
        ConfigError: the model cannot be cut, or not into so many stages.
    """
    if not hasattr(model, "stage_costs"):
        raise ConfigError(
            f"parallel.pp={config.pp}: {type(model).__name__} cannot be cut into pipeline stages", "parallel.pp=1"
        )
    count = config.pp * (config.pp_virtual if config.pp_schedule == "interleaved" else 1)
    names = list(model.blocks)
    sizes = list(config.pp_split or ())
    if not sizes:
        costs = model.stage_costs()
        sizes = partition(costs.layers, count, costs.first, costs.last)
    elif len(sizes) != count or sum(sizes) != len(names) or min(sizes) < 1:
        raise ConfigError(
            f"parallel.pp_split={sizes}: must be {count} positive numbers that sum to the {len(names)} layers",
            "parallel.pp_split=null cuts by cost",
        )
    ranges, start = [], 0
    for index, size in enumerate(sizes):
        layers = tuple(names[start : start + size])
        ranges.append(StageRange(index, layers, index == 0, index == count - 1))
        start += size
    return ranges


def own_ranges(ranges: Sequence[StageRange], topology: Topology) -> list[StageRange]:
    """The stages that this rank holds."""
    pp = topology["pp"]
    return [stage for stage in ranges if stage.index % pp.size == pp.rank]


def keep_own_layers(model: Any, stages: Sequence[StageRange]) -> None:
    """Take the parts of other ranks' stages away from the model."""
    model.keep([name for stage in stages for name in stage.layers])


class _StageModule(nn.Module):
    """A stage as torch's schedules call it; it owns no parameters of its own name."""

    model: Any

    def __init__(self, model: nn.Module, stage: StageRange, autocast: Autocast):
        super().__init__()
        object.__setattr__(self, "model", model)
        self.stage, self.autocast = stage, autocast

    def forward(self, inputs: Tensor) -> Tensor:
        with self.autocast():
            output = self.model.run(inputs, self.stage.layers)
        return output.float() if self.stage.last else output


class Pipeline:
    """Runs micro-batches through the stages.

    Args:
        model: this rank's part.
        stages: of this rank.
        num_stages: in all.
        topology: of this rank.
        config: degrees and schedule.
        num_microbatches: of one optimizer step.
        loss: (output of the last stage, targets) -> what is differentiated for one micro-batch.
        device: of this rank.
        autocast: makes the context that a stage runs in.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[StageRange],
        num_stages: int,
        topology: Topology,
        config: ParallelConfig,
        num_microbatches: int,
        loss: Loss,
        device: torch.device,
        autocast: Autocast,
    ):
        self.model: Any = model
        self.stages, self.num_stages = list(stages), num_stages
        self.pp, self.tp, self.config, self.device, self.loss = topology["pp"], topology["tp"], config, device, loss
        self.num_microbatches = num_microbatches
        self.modules = [_StageModule(model, stage, autocast) for stage in self.stages]
        self._schedule: Any = None

    @property
    def holds_last(self) -> bool:
        """Whether this rank holds the last stage, and so sees losses and logits."""
        return self.stages[-1].last

    def train(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Forward and backward of all micro-batches; gradients are added to the parameters.

        Args:
            inputs: int64 [num_microbatches * B, S], the same on all ranks of the pp group.
            targets: likewise.

        Returns:
            What `loss` returned for each micro-batch, on the last stage; empty elsewhere.
        """
        if self._schedule is None:
            self._schedule = self._make_schedule(inputs.shape[0] // self.num_microbatches, inputs.shape[1])
        losses: list[Tensor] = []
        args = (inputs,) if self.stages[0].first else ()
        more = {"target": targets, "losses": losses} if self.holds_last else {}
        with watched("pipeline schedule", self.pp):
            self._schedule.step(*args, **more, return_outputs=False)
        return losses

    def _make_schedule(self, batch: int, length: int) -> Any:
        """Stages with shapes known beforehand, so that nothing has to be run to learn them."""
        between = {"micro-batches": self.num_microbatches, "between stages": self._boundary(batch, length)}
        collectives.agree("the shapes that the pipeline sends", between, self.pp)
        boundary = torch.empty(self._boundary(batch, length), device="meta", requires_grad=True)
        tokens = torch.empty(batch, length, dtype=torch.int64, device="meta")
        stages: list[Any] = [
            PipelineStage(
                module,
                module.stage.index,
                self.num_stages,
                self.device,
                input_args=tokens if module.stage.first else boundary,
                output_args=self._logits(batch, length) if module.stage.last else boundary,
                group=self.pp.process_group,
            )
            for module in self.modules
        ]
        # Losses are divided by the number of micro-batches already, so torch must not scale the gradients again.
        if self.config.pp_schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, self.num_microbatches, self.loss, scale_grads=False)
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[self.config.pp_schedule]
        return kind(stages[0], self.num_microbatches, self.loss, scale_grads=False)

    def _boundary(self, batch: int, length: int) -> tuple[int, ...]:
        *lead, width = self.model.boundary_shape(batch, length)
        if self.config.sequence_parallel:
            lead[-1] //= self.tp.size
        return (*lead, width)

    def _logits(self, batch: int, length: int) -> Tensor:
        return torch.empty(batch, length, self.model.head.weight.shape[0], device="meta", requires_grad=True)

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor | None:
        """Forward pass of one batch of any size, stage by stage; logits on the last stage, None elsewhere."""
        shape = self._boundary(*inputs.shape)
        output: Tensor | None = None
        for module in self.modules:
            index = module.stage.index
            x = inputs
            if not module.stage.first:
                x = collectives.receive(torch.empty(shape, device=self.device), (index - 1) % self.pp.size, self.pp)
            output = module(x)
            if not module.stage.last:
                collectives.send(output.float().contiguous(), (index + 1) % self.pp.size, self.pp)
        return output if self.holds_last else None
