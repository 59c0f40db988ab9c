"""Evaluation: sums and counts over the whole set, never means of means."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moeflow.data.loader import eval_batches
from moeflow.train.session import Session
from moeflow.train.step import Stepper, batch_means, make_stepper, metric_sums


def evaluate(session: Session, stepper: Stepper | None = None) -> dict[str, float]:
    """Evaluate the model; every rank must call it.

    Args:
        session: of this process.
        stepper: runs the forward passes; None makes one.

    Returns:
        "eval/loss" (mean over the samples, or tokens) and one "eval/METRIC" for each other metric of the task.
    """
    metrics = evaluate_unless(lambda: False, session, stepper)
    assert metrics is not None
    return metrics


@torch.no_grad()
def evaluate_unless(
    stop: Callable[[], bool], session: Session, stepper: Stepper | None = None
) -> dict[str, float] | None:
    """Evaluate as `evaluate` does, or give up between two batches.

    Args:
        stop: asked after each batch whether to give up; the same answer on every rank.
        session: of this process.
        stepper: runs the forward passes; None makes one.

    Returns:
        The metrics, or None where it was given up.
    """
    config, model = session.config, session.model
    stepper = stepper or make_stepper(session)
    was_training = model.training
    model.eval()
    batches = eval_batches(
        session.data.eval,
        batch=config.data.eval_batch_size,
        dp_size=session.dp_size,
        dp_rank=session.topology["dp"].rank,
        max_batches=config.trainer.eval_batches,
        device=session.device,
    )
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        logits = stepper.logits(batch["inputs"])
        for name, pair in metric_sums(session, [(logits, batch)] if logits is not None else []).items():
            sums[name] = sums[name] + pair if name in sums else pair
        if stop():
            model.train(was_training)
            return None
    model.train(was_training)
    means = batch_means(session, sums)
    return {f"eval/{name}": value for name, value in {**means, **session.task.derived(means)}.items()}
