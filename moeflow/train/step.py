"""Forward and backward of one optimizer step: micro-batches one after another, or through a pipeline.

Both leave the same gradients: those of the mean loss over the rank's samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moeflow.ops.phases import BACKWARD, REST, phase
from moeflow.parallel import collectives
from moeflow.parallel.engines import Engine
from moeflow.parallel.pipeline import Pipeline
from moeflow.train.session import Session, pipeline_microbatches, set_aux_loss_scale

Batch = dict[str, Tensor]


@dataclass
class StepOutput:
    """What one step showed on this rank.

    Attributes:
        loss: mean over this rank's samples; 0-dim, zero where another stage has it.
        norm: global gradient norm before clipping.
        taken: whether the optimizer's step was taken.
        outputs: (logits, batch) of each micro-batch; empty where there are none.
        batches: of this rank.
    """

    loss: Tensor
    norm: Tensor
    taken: bool = True
    outputs: list[tuple[Tensor, Batch]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)


class Stepper(Protocol):
    """Runs steps and forward passes."""

    def step(self, batches: Iterator[Batch]) -> StepOutput:
        """Forward, backward and the engine's step."""
        ...

    def logits(self, inputs: Tensor) -> Tensor | None:
        """Forward pass alone; None on a rank that does not hold the last stage."""
        ...


class PlainStepper:
    """All layers are here: micro-batches one after another."""

    def __init__(self, session: Session, engine: Engine | None = None):
        self.session, self.engine = session, engine

    def step(self, batches: Iterator[Batch]) -> StepOutput:
        engine, task = self.engine, self.session.task
        assert engine is not None
        set_aux_loss_scale(self.session.model, engine.loss_scale())
        losses, result = [], StepOutput(torch.zeros(()), torch.zeros(()))
        accumulated = self.session.config.trainer.grad_accum
        for number in range(accumulated):
            with phase("data"):
                batch = next(batches)
            with engine.micro_batch(last=number == accumulated - 1):
                with phase(REST):
                    logits = engine.model(batch["inputs"])
                    loss = task.loss(logits, batch)
                with phase(BACKWARD):
                    engine.backward(loss)
            losses.append(loss.detach())
            result.outputs.append((logits.detach(), batch))
            result.batches.append(batch)
        with phase("gradient sync"):  # all of it but the optimizer, which torch marks itself
            result.norm, result.taken = engine.step()
        result.loss = torch.stack(losses).mean()
        return result

    def logits(self, inputs: Tensor) -> Tensor | None:
        return self.session.model(inputs)


class PipelineStepper:
    """The layers are spread over the pp group: all micro-batches of a step go through one run of the schedule."""

    def __init__(self, session: Session, engine: Engine | None = None):
        self.session, self.engine = session, engine
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
        assert self.engine is not None
        return self.engine.loss_scale() / self.num_microbatches

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.session.task.loss(logits, {"targets": targets}) * self._scale()

    def step(self, batches: Iterator[Batch]) -> StepOutput:
        assert self.engine is not None
        with phase("data"):
            own = [next(batches) for _ in range(self.accumulated)]
        scale = self._scale()
        set_aux_loss_scale(self.session.model, scale)
        with self.engine.micro_batch(last=True), phase(REST):
            losses = self.pipeline.train(
                torch.cat([batch["inputs"] for batch in own]), torch.cat([batch["targets"] for batch in own])
            )
        with phase("gradient sync"):
            norm, taken = self.engine.step()
        loss = torch.stack(losses).sum() / (scale * self.num_microbatches) if losses else torch.zeros(())
        return StepOutput(loss.detach(), norm, taken, [], own)

    def logits(self, inputs: Tensor) -> Tensor | None:
        return self.pipeline.forward(inputs)


def make_stepper(session: Session, engine: Engine | None = None) -> Stepper:
    """The stepper of this layout; without an engine it serves evaluation alone."""
    return PipelineStepper(session, engine) if session.stages else PlainStepper(session, engine)


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
