"""Evaluation: sums and counts over the whole set, never means of means."""

from __future__ import annotations

import math

import torch

from moeflow.data.loader import eval_batches
from moeflow.parallel import collectives
from moeflow.train.session import Session


@torch.no_grad()
def evaluate(session: Session) -> dict[str, float]:
    """Evaluate the model; every rank must call it.

    Returns:
        "eval/loss" (mean over the samples, or tokens) and one "eval/METRIC" for each other metric of the task.
    """
    config, model, task = session.config, session.model, session.model.task
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
        logits = model(batch["inputs"])
        for name, (total, count) in task.metrics(logits, batch).items():
            pair = torch.stack([torch.as_tensor(total), torch.as_tensor(count)]).double()
            sums[name] = sums[name] + pair if name in sums else pair
    model.train(was_training)
    means = {}
    for name in sorted(sums):
        total, count = collectives.all_reduce(sums[name], session.topology["dp"]).tolist()
        means[name] = total / count if count else math.nan
    return {f"eval/{name}": value for name, value in {**means, **task.derived(means)}.items()}
