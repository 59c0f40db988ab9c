"""What an image classifier is trained and measured by.

Legend: B samples, C classes.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Task(Protocol):
    """What the loop asks of `model.task`.

    Attributes:
        unit: what throughput is counted in, "samples" or "tokens".
    """

    unit: str

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the samples (or tokens); 0-dim."""

    def metrics(self, logits: Tensor, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Sum and count of each metric."""

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics that follow from the means of others."""

    def num_units(self, batch: dict[str, Tensor]) -> int:
        """Samples or tokens of a batch."""


class ClassificationTask:
    """One label of C for each sample.

    Args:
        label_smoothing: probability, in [0, 1), spread evenly over all classes (arXiv:1512.00567, section 7).  It is a
            part of the training loss only: metrics are of the plain labels.

    Attributes:
        unit: what throughput is counted in.
    """

    unit = "samples"

    def __init__(self, label_smoothing: float = 0.0):
        self.label_smoothing = label_smoothing

    def loss(self, logits_BC: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy over the samples, in nats; float32 0-dim.

        Args:
            logits_BC: [B, C].
            batch: "targets" int64 [B].
        """
        return functional.cross_entropy(logits_BC.float(), batch["targets"], label_smoothing=self.label_smoothing)

    def metrics(self, logits_BC: Tensor, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Sums and counts over the samples: "loss" (without smoothing) and "accuracy" (of the largest logit).

        Args:
            logits_BC: [B, C].
            batch: "targets" int64 [B]; "valid" bool [B], where some samples do not count.
        """
        targets_B = batch["targets"]
        valid_B = batch.get("valid", torch.ones_like(targets_B, dtype=torch.bool))
        losses_B = functional.cross_entropy(logits_BC.float(), targets_B, reduction="none")
        count = valid_B.sum()
        return {
            "loss": (losses_B.where(valid_B, 0.0).sum(dtype=torch.float64), count),
            "accuracy": (((logits_BC.argmax(1) == targets_B) & valid_B).sum(), count),
        }

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics that are no means themselves: none."""
        return {}

    def num_units(self, batch: dict[str, Tensor]) -> int:
        """Samples of a batch."""
        return len(batch["targets"])
