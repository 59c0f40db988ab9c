"""The training loop.

Everything that decides the next step is a function of the step's number and of what a checkpoint holds: the learning
rate, the samples and their augmentation, the random generators.  So a resumed run goes on as if it had never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moeflow.data.loader import train_batches
from moeflow.moe.gates import after_step
from moeflow.parallel import collectives
from moeflow.parallel.engines import make_engine
from moeflow.parallel.engines.base import Split
from moeflow.parallel.parallelize import moe_layers
from moeflow.schema import RunConfig
from moeflow.train import snapshot
from moeflow.train.bad_steps import BadSteps, spread_to_gradients
from moeflow.train.checkpoint import CheckpointStore, Keep
from moeflow.train.evaluate import evaluate_unless
from moeflow.train.moe_metrics import Loads, moe_metrics
from moeflow.train.optim import build_optimizer, learning_rate, set_learning_rate
from moeflow.train.profiling import StepProfiler
from moeflow.train.reporter import Reporter
from moeflow.train.session import Session
from moeflow.train.shelf import resume_command
from moeflow.train.signals import StopSignal
from moeflow.train.step import StepOutput, batch_means, make_stepper, metric_sums

# In the meta of a checkpoint whose step was to be evaluated when a signal came.
OWES_EVALUATION = "owes_evaluation"


def _build_optimizer(config: RunConfig, model: nn.Module, split: Split) -> Optimizer:
    return build_optimizer(model, config.optim, split)


class Trainer:
    """Trains the model of a session.

    Args:
        session: this process's part of the run.
        store: where checkpoints go.
        stop: tells when the user or the scheduler wants the run to end.
    """

    def __init__(self, session: Session, store: CheckpointStore, stop: StopSignal):
        self.session, self.store, self.stop = session, store, stop
        self.config: RunConfig = session.config
        self.accelerator, self.topology = session.accelerator, session.topology
        self.step = 0
        self.engine = make_engine(
            self.config, self.accelerator, self.topology, session.part, partial(_build_optimizer, self.config)
        )
        self.stepper = make_stepper(session, self.engine)
        self.snapshot = snapshot.Snapshot(session, self.engine)
        self.profiler = StepProfiler(session, store.folder.parent / "traces")
        self.bad_steps = BadSteps(store.folder.parent, self.config.trainer.skip_bad_steps, self.topology.is_main)
        spread_to_gradients(session.task)
        self.last_eval: dict[str, float] = {}
        self.loads: Loads = {}
        self._owes_evaluation = False
        self._saved_step: int | None = None
        self.stopped_by: int | None = None

    # --- resuming ----------------------------------------------------------------------------------------------------

    def restore(self, step: int, other_data: bool = False) -> None:
        """Take everything back from the checkpoint of a step, that was trained on the same data unless `other_data`.

        Raises:
            CheckpointError: it is damaged or does not fit.
        """
        meta = self.snapshot.load(self.store, step, other_data)
        self.step = self._saved_step = meta["step"]
        self._owes_evaluation = bool(meta.get(OWES_EVALUATION))
        self.bad_steps.rewind(self.step)

    def _save(self) -> None:
        if self._saved_step == self.step:
            return
        metrics = self.last_eval if self.last_eval.get("step") == self.step else {}
        keep = self.config.checkpoint
        metric, direction = ("eval/accuracy", "max") if "eval/accuracy" in self.last_eval else ("eval/loss", "min")
        self.snapshot.save(
            self.store,
            self.step,
            {k: v for k, v in metrics.items() if k != "step"},
            Keep(keep.keep_last, keep.keep_best, metric, direction),
            {OWES_EVALUATION: True} if self._owes_evaluation else {},
        )
        self._saved_step = self.step

    # --- the loop ----------------------------------------------------------------------------------------------------

    def fit(self, reporter: Reporter) -> dict[str, Any]:
        """Train to the last step, or until asked to stop.

        Args:
            reporter: where numbers go; silent on all ranks but 0.

        Returns:
            The summary: final metrics, and "status": "finished" or "interrupted".

        Raises:
            TrainingError: the loss or the gradients are not finite, for more steps in a row than are left out.
        """
        trainer = self.config.trainer
        last = trainer.max_steps if trainer.stop_at is None else min(trainer.stop_at, trainer.max_steps)
        batches = self._batches()
        self.session.model.train()
        reporter.start()
        self.stop.begin()
        if self._owes_evaluation and self._evaluate(reporter):
            self._saved_step = None
            self._save()
        while self.step < last:
            rate = self._learning_rate()
            with self.profiler.step():
                output = self._train_step(batches)
            self.step += 1
            # Not at a stop in between: a run in parts leaves the same rows as one in one go.
            logged = self._due(trainer.log_every) or self.step in (1, trainer.max_steps)
            units = sum(map(self.session.task.num_units, output.batches))
            row = self._complete(rate, output) if logged else None
            reporter.progress(self.step, units, row, self.loads if logged else None)
            reporter.aside(*self.profiler.report(self.step))
            stopping = self._asked_to_stop()
            if self._due(trainer.eval_every) or self.step == trainer.max_steps:
                # Whoever wants the run to end may wait for a step, not for a whole evaluation: the next life does it.
                self._owes_evaluation = stopping
                stopping = stopping or not self._evaluate(reporter)
            if stopping or self._due(self.config.checkpoint.every) or self.step == last:
                self._save()
            if stopping:
                break
        done = self.last_eval.get("step") == self.step or self._owes_evaluation
        if self.step == trainer.max_steps and not done:
            self._evaluate(reporter)
        reporter.aside(*self.profiler.report(self.step, ending=True))
        # What the summary calls saved is on disk.
        self.store.wait()
        return self._summary()

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        return train_batches(
            self.session.data.train,
            micro_batch=self.session.micro_batch,
            dp_size=self.session.dp_size,
            dp_rank=self.topology["dp"].rank,
            seed=self.config.run.seed,
            start=self.step * self.config.trainer.grad_accum,
            grad_accum=self.config.trainer.grad_accum,
            device=self.session.device,
            num_workers=self.config.data.num_workers,
        )

    def _train_step(self, batches: Iterator[dict[str, Tensor]]) -> StepOutput:
        """One optimizer step over all micro-batches."""
        set_learning_rate(self.engine.optimizer, self._learning_rate())
        output = self.stepper.step(batches)
        if not output.taken:
            self._leave_out(output)
            return output
        self.bad_steps.good()
        after_step(self.session.model, partial(collectives.all_reduce, group=self.topology["stage"]))
        self.session.balance.end_step(self.step + 1, self.engine.optimizer)
        return output

    def _leave_out(self, output: StepOutput) -> None:
        """Write down a step that changed nothing."""
        for layer in moe_layers(self.session.model).values():
            if layer.gate.counts_E is not None:
                layer.gate.counts_E.zero_()
        own = [number for batch in output.batches for number in batch["ids"].tolist()]
        ids = [number for part in collectives.gather_objects(own, self.topology["dp"]) for number in part]
        loss = batch_means(self.session, self._loss_sums(output))["loss"]
        self.bad_steps.bad(self.step + 1, loss, output.norm.item(), ids, self._gentler())

    def _loss_sums(self, output: StepOutput) -> dict[str, Tensor]:
        """[sum, count] of the loss on a rank that holds the last stage; empty elsewhere."""
        if self.session.stages and not self.session.stages[-1].last:
            return {}
        pair = torch.stack([output.loss.double().cpu(), torch.ones((), dtype=torch.float64)])
        return {"loss": pair.to(self.session.device)}

    def _learning_rate(self) -> float:
        return learning_rate(self.step, self.config.optim.lr, self.config.schedule, self.config.trainer.max_steps)

    def _gentler(self) -> str:
        """What to do about a loss or gradients that blew up."""
        lower = f"optim.lr={self.config.optim.lr / 10:g}"
        ways = "schedule.warmup_steps" if self.config.optim.clip_norm else "schedule.warmup_steps, or optim.clip_norm=1"
        step = self.store.latest()
        if step is None:
            return f"start anew with {lower}, or with more {ways}"
        return (
            f"{resume_command(self.store.folder.parent)} {lower} goes on from step {step} "
            f"(--step N from an earlier one); or more {ways}"
        )

    def _complete(self, rate: float, output: StepOutput) -> dict[str, float]:
        """The row of the whole batch: means over the data-parallel ranks; every rank must call it."""
        sums = self._loss_sums(output)
        if sums:
            # The loss that was trained on, not the metric of that name, which is without label smoothing.
            sums = metric_sums(self.session, output.outputs) | sums
        means = batch_means(self.session, sums)
        moe, self.loads = moe_metrics(self.session.model, self.topology)
        return {
            "loss": means.pop("loss"),
            **means,
            "lr": rate,
            "grad_norm": output.norm.item(),
            "epoch": self.step * self.config.data.batch_size / len(self.session.data.train),
            **moe,
            **self.session.balance.metrics(),
        }

    def _evaluate(self, reporter: Reporter) -> bool:
        """Evaluate and report; whether it was not given up for a signal."""
        started = time.perf_counter()
        metrics = evaluate_unless(self._asked_to_stop, self.session, self.stepper)
        self._owes_evaluation = metrics is None
        if metrics is not None:
            self.last_eval = {**metrics, "step": self.step}
            reporter.evaluation(self.step, metrics, time.perf_counter() - started)
        return metrics is not None

    def _asked_to_stop(self) -> bool:
        """Whether any rank was sent a signal: all of them then stop, after the same step."""
        number = self.stop.signum or 0
        if self.topology["world"].size > 1:
            flag = torch.tensor(number, device=self.session.device)
            number = int(collectives.all_reduce(flag, self.topology["world"], "max").item())
        self.stopped_by = number or None
        return number != 0

    def _summary(self) -> dict[str, Any]:
        finished = self.step >= self.config.trainer.max_steps and not self._owes_evaluation
        metrics = {k: v for k, v in self.last_eval.items() if k != "step"}
        return {
            "status": "finished" if finished else "interrupted",
            "step": self.step,
            "max_steps": self.config.trainer.max_steps,
            "samples": self.step * self.config.data.batch_size,
            "data": self.session.data.source,
            **({"bad_steps": self.bad_steps.total} if self.bad_steps.total else {}),
            **metrics,
        }
