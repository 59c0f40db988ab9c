"""Forward and backward of one optimizer step: micro-batches one after another, or through a pipeline.

Both leave the same gradients: those of the mean loss over the rank's samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from moeflow.parallel import collectives
from moeflow.parallel.pipeline import Pipeline
from moeflow.parallel.prepare import loss_scale
from moeflow.train.session import Session, pipeline_microbatches, set_aux_loss_scale

Batch = dict[str, Tensor]


@dataclass
class StepOutput:
    """What one step showed on this rank.

    Attributes:
        loss: mean over this rank's samples; 0-dim, zero where another stage has it.
        norm: global gradient norm before clipping.
        outputs: (logits, batch) of each micro-batch; empty where there are none.
        batches: of this rank.
    """

    loss: Tensor
    norm: Tensor
    outputs: list[tuple[Tensor, Batch]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)


class Stepper(Protocol):
    """Runs steps and forward passes."""

    def step(self, batches: Iterator[Batch], finish: Callable[[], Tensor]) -> StepOutput:
        """Forward, backward and the optimizer's step; `finish` reduces and clips the gradients and returns the norm."""
        ...

    def logits(self, inputs: Tensor) -> Tensor | None:
        """Forward pass alone; None on a rank that does not hold the last stage."""
        ...


class PlainStepper:
    """All layers are here: micro-batches one after another, accumulated by Accelerate."""

    def __init__(self, session: Session, optimizer: Optimizer | None = None):
        self.session, self.optimizer = session, optimizer

    def step(self, batches: Iterator[Batch], finish: Callable[[], Tensor]) -> StepOutput:
        accelerator, model, task = self.session.accelerator, self.session.model, self.session.task
        assert self.optimizer is not None
        set_aux_loss_scale(model, loss_scale(accelerator))
        losses, result = [], StepOutput(torch.zeros(()), torch.zeros(()))
        for _ in range(accelerator.gradient_accumulation_steps):
            batch = next(batches)
            with accelerator.accumulate(model):
                logits = model(batch["inputs"])
                loss = task.loss(logits, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    result.norm = finish()
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.detach())
            result.outputs.append((logits.detach(), batch))
            result.batches.append(batch)
        result.loss = torch.stack(losses).mean()
        return result

    def logits(self, inputs: Tensor) -> Tensor | None:
        return self.session.model(inputs)


class PipelineStepper:
    """The layers are spread over the pp group: all micro-batches of a step go through one run of the schedule."""

    def __init__(self, session: Session, optimizer: Optimizer | None = None):
        self.session, self.optimizer = session, optimizer
        config = session.config
        self.accumulated = config.trainer.grad_accum
        self.num_microbatches = self.accumulated * pipeline_microbatches(config)
        self.pipeline = Pipeline(
            session.model,
            session.stages,
            session.num_stages,
            session.topology,
            config.parallel,
            self.num_microbatches,
            self._loss,
            session.device,
            session.accelerator.autocast,
        )

    def _scale(self) -> float:
        return loss_scale(self.session.accelerator) / self.num_microbatches

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.session.task.loss(logits, {"targets": targets}) * self._scale()

    def step(self, batches: Iterator[Batch], finish: Callable[[], Tensor]) -> StepOutput:
        assert self.optimizer is not None
        accelerator = self.session.accelerator
        own = [next(batches) for _ in range(self.accumulated)]
        set_aux_loss_scale(self.session.model, self._scale())
        with accelerator.accumulate(self.session.model):
            losses = self.pipeline.train(
                torch.cat([batch["inputs"] for batch in own]), torch.cat([batch["targets"] for batch in own])
            )
            norm = finish()
            self.optimizer.step()
            self.optimizer.zero_grad()
        loss = torch.stack(losses).sum() / (self._scale() * self.num_microbatches) if losses else torch.zeros(())
        return StepOutput(loss.detach(), norm, [], own)

    def logits(self, inputs: Tensor) -> Tensor | None:
        return self.pipeline.forward(inputs)


def make_stepper(session: Session, optimizer: Optimizer | None = None) -> Stepper:
    """The stepper of this layout; without an optimizer it serves evaluation alone."""
    return PipelineStepper(session, optimizer) if session.stages else PlainStepper(session, optimizer)


def batch_means(session: Session, sums: dict[str, Tensor]) -> dict[str, float]:
    """Means over the data-parallel ranks, the same on every rank of the world's part that holds these samples.

    Args:
        session: of this process.
        sums: metric -> [sum, count] on the rank that holds the last stage; empty elsewhere.
    """
    means = {}
    for name in sorted(sums):
        total, count = collectives.all_reduce(sums[name].double(), session.topology["dp"]).tolist()
        means[name] = total / count if count else float("nan")
    pp = session.topology["pp"]
    return collectives.broadcast_object(means, pp, source=pp.size - 1)


def metric_sums(session: Session, outputs: list[tuple[Tensor, Batch]]) -> dict[str, Tensor]:
    """[sum, count] of each metric of the task over some outputs."""
    sums: dict[str, Tensor] = {}
    for logits, batch in outputs:
        for name, (total, count) in session.task.metrics(logits, batch).items():
            pair = torch.stack([torch.as_tensor(total), torch.as_tensor(count)]).double()
            sums[name] = sums[name] + pair if name in sums else pair
    return sums
