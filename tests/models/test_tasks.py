from __future__ import annotations

import math

import pytest
import torch

from moeflow.models.tasks import ClassificationTask

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.5], [0.3, 0.2, 0.1]])
TARGETS = torch.tensor([0, 2, 0])


def by_hand(row: list[float], target: int, smoothing: float) -> float:
    log_sum = math.log(sum(map(math.exp, row)))
    wanted = [smoothing / len(row) + (1 - smoothing) * (c == target) for c in range(len(row))]
    return -sum(w * (x - log_sum) for w, x in zip(wanted, row, strict=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_is_the_mean_cross_entropy_and_metrics_have_no_smoothing(smoothing: float):
    task = ClassificationTask(smoothing)
    rows = list(zip(LOGITS.tolist(), TARGETS.tolist(), strict=True))
    expected = sum(by_hand(row, target, smoothing) for row, target in rows) / 3
    assert task.loss(LOGITS, {"targets": TARGETS}).item() == pytest.approx(expected, rel=1e-6)
    metrics = task.metrics(LOGITS, {"targets": TARGETS})
    assert metrics["loss"][0].item() == pytest.approx(sum(by_hand(row, target, 0.0) for row, target in rows), rel=1e-6)
    assert (metrics["loss"][1], *metrics["accuracy"]) == (3, 2, 3)


def test_samples_that_are_not_valid_count_nowhere():
    valid = torch.tensor([True, True, False])
    logits = LOGITS.clone()
    logits[2] = math.nan
    metrics = ClassificationTask().metrics(logits, {"targets": TARGETS, "valid": valid})
    whole = ClassificationTask().metrics(LOGITS[:2], {"targets": TARGETS[:2]})
    assert {name: [x.item() for x in pair] for name, pair in metrics.items()} == {
        name: [x.item() for x in pair] for name, pair in whole.items()
    }


def test_units_are_samples():
    task = ClassificationTask()
    assert (task.unit, task.num_units({"targets": TARGETS}), task.derived({"loss": 1.0})) == ("samples", 3, {})
