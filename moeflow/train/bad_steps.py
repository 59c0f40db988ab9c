"""Steps whose loss or gradients are not finite: left out, counted, written down, and an end to it after some in a row.

    RUN_DIR/bad_steps.jsonl   one JSON object for each: step, loss, grad_norm, and the ids of the samples

A step that is left out changes neither parameters nor optimizer state; its samples are not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeflow.errors import TrainingError
from moeflow.logging import get_logger
from moeflow.train.files import json_bytes, write_atomic

logger = get_logger(__name__)
FILE = "bad_steps.jsonl"


class BadSteps:
    """Counts them; every rank has the same counts, and rank 0 writes.

    Args:
        run_dir: of the run.
        allowed: steps in a row that are left out; one more ends the run.
        is_main: whether this rank writes.

    Attributes:
        total: of the run, those before a resume included.
    """

    def __init__(self, run_dir: Path, allowed: int, is_main: bool):
        self.path, self.allowed, self._is_main = run_dir / FILE, allowed, is_main
        self.total = self._in_a_row = 0

    def rewind(self, step: int) -> None:
        """Forget those after `step`, which is done again."""
        rows = [row for row in self._read() if row.get("step", 0) <= step]
        self.total = len(rows)
        if self._is_main and self.path.is_file():
            write_atomic(self.path, b"".join(json_bytes(row, None) for row in rows))

    def good(self) -> None:
        """A step was finite."""
        self._in_a_row = 0

    def bad(self, step: int, loss: float, norm: float, ids: Sequence[int], mend: str) -> None:
        """A step was left out.

        Args:
            step: its number, from 1.
            loss: mean over the batch.
            norm: of the gradients.
            ids: numbers of its samples in the data set.
            mend: what to do when it was one too many.

        Raises:
            TrainingError: more in a row than are allowed.
        """
        self.total += 1
        self._in_a_row += 1
        if self._is_main:
            row = {"step": step, "loss": loss, "grad_norm": norm, "ids": list(ids)}
            with open(self.path, "ab") as stream:
                stream.write(json_bytes(row, None))
        if self._in_a_row > self.allowed:
            again = "" if self.allowed == 0 else f", after {self.allowed} such steps before it that were left out"
            raise TrainingError(
                f"step {step}: the gradient norm is {norm}{again}; the parameters are still those of the last good "
                f"step, and the samples are listed in {self.path}",
                mend,
            )
        if self._is_main:
            logger.warning(
                "step %d is left out: the gradient norm is %s (%d of %d allowed in a row); its samples are in %s",
                *(step, norm, self._in_a_row, self.allowed, self.path),
            )

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # torn by a crash
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows


def spread_to_gradients(task: Any) -> None:
    """Let a loss that is not finite make its gradients so: on all ranks the gradient norm then tells of it.

    An infinite loss may have finite gradients (a cross-entropy of a probability of zero).
    """
    plain = task.loss

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        value = plain(logits, batch)
        # A factor, for the gradient of a choice between values would be nan on both sides.
        return value * torch.where(value.detach().isfinite(), 1.0, float("nan"))

    task.loss = loss
