"""Pipeline parallelism with torch.distributed.pipelining.

A model that can be cut offers (see `moeflow.models.transformer.GPT`):

    blocks               nn.ModuleDict of its layers, keyed by their number in the whole model
    stage_costs()        costs of the layers, and what the first and the last stage have beside them
    keep(layers, first, last)        takes the parts of other stages away
    run(inputs, layers, first, last) runs some of the layers (and the ends)
    boundary_shape(inputs shape)     shape of what one stage sends to the next

Each rank keeps one model object with the layers of all its stages, under their global names, so that parameters,
checkpoints and gradients do not know of stages.  Interleaved schedules give a rank several stages: stage i stands on
rank i mod pp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from moeflow.errors import ConfigError
from moeflow.parallel import collectives
from moeflow.parallel.topology import Topology
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


def stage_ranges(model: nn.Module, config: ParallelConfig) -> list[StageRange]:
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


def keep_own_layers(model: nn.Module, stages: Sequence[StageRange]) -> None:
    """Take the parts of other ranks' stages away from the model."""
    layers = [name for stage in stages for name in stage.layers]
    model.keep(layers, first=any(s.first for s in stages), last=any(s.last for s in stages))


class _StageModule(nn.Module):
    """A stage as torch's schedules call it; it owns no parameters of its own name."""

    def __init__(self, model: nn.Module, stage: StageRange, autocast: Autocast):
        super().__init__()
        object.__setattr__(self, "model", model)
        self.stage, self.autocast = stage, autocast

    def forward(self, inputs: Tensor) -> Tensor:
        with self.autocast():
            output = self.model.run(inputs, self.stage.layers, self.stage.first, self.stage.last)
        return output.float() if self.stage.last else output


class Pipeline:
    """Runs micro-batches through the stages.

    Args:
        model: this rank's part.
        stages: of this rank.
        num_stages: in all.
        topology: of this rank.
        schedule: "gpipe", "1f1b" or "interleaved".
        num_microbatches: of one optimizer step.
        input_shape: of one micro-batch's inputs.
        loss: (output of the last stage, targets) -> what is differentiated for one micro-batch.
        dtype: of what the stages send.
        device: of this rank.
        autocast: makes the context that a stage runs in.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[StageRange],
        num_stages: int,
        topology: Topology,
        schedule: str,
        num_microbatches: int,
        input_shape: Sequence[int],
        loss: Loss,
        dtype: torch.dtype,
        device: torch.device,
        autocast: Autocast,
    ):
        self.model, self.stages, self.num_stages = model, list(stages), num_stages
        self.pp, self.dtype, self.device = topology["pp"], dtype, device
        self.modules = [_StageModule(model, stage, autocast) for stage in self.stages]
        boundary = torch.empty(model.boundary_shape(input_shape), dtype=dtype, device="meta")
        boundary.requires_grad_()
        tokens = torch.empty(tuple(input_shape), dtype=torch.int64, device="meta")
        pipeline_stages = [
            PipelineStage(
                module,
                stage.index,
                num_stages,
                device,
                input_args=tokens if stage.first else boundary,
                output_args=torch.empty(model.output_shape(input_shape), device="meta").requires_grad_()
                if stage.last
                else boundary,
                group=self.pp.process_group,
            )
            for stage, module in zip(self.stages, self.modules, strict=True)
        ]
        # Losses are already divided by the number of micro-batches, so torch must not scale the gradients again.
        if schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(pipeline_stages, num_microbatches, loss, scale_grads=False)
        else:
            kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
            self._schedule = kind(pipeline_stages[0], num_microbatches, loss, scale_grads=False)

    @property
    def holds_last(self) -> bool:
        """Whether this rank holds the last stage, and so sees losses and logits."""
        return self.stages[-1].last

    def train(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Forward and backward of all micro-batches; gradients are added to the parameters.

        Args:
            inputs: of all micro-batches, one after another along dimension 0; the same on all stages' ranks.
            targets: likewise.

        Returns:
            What `loss` returned for each micro-batch, on the last stage; empty elsewhere.
        """
        losses: list[Tensor] = []
        args = (inputs,) if self.stages[0].first else ()
        if self.holds_last:
            self._schedule.step(*args, target=targets, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*args, return_outputs=False)
        return losses

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor | None:
        """Forward pass of one batch of any size, stage by stage; logits on the last stage, None elsewhere."""
        shape = self.model.boundary_shape(inputs.shape)
        output: Tensor | None = None
        for index in range(self.num_stages):
            mine = [m for m in self.modules if m.stage.index == index]
            source, target = (index - 1) % self.pp.size, (index + 1) % self.pp.size
            if not mine:
                continue
            if index == 0:
                x = inputs
            else:
                x = collectives.receive(torch.empty(shape, dtype=self.dtype, device=self.device), source, self.pp)
            output = mine[0](x)
            if index < self.num_stages - 1:
                collectives.send(output.to(self.dtype).contiguous(), target, self.pp)
        return output if self.holds_last else None
