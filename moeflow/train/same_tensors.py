"""Whether two checkpoints hold the same values, whatever layouts saved them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from moeflow.train import whole
from moeflow.train.checkpoint import CheckpointStore


@dataclass(slots=True)
class TensorsComparison:
    """How the tensors of two checkpoints differ.

    Attributes:
        total: tensors that both have.
        differing: name -> largest difference of an entry, infinite where a shape or dtype differs; the largest first.
        only_a: names that only the first has.
        only_b: names that only the second has.
    """

    total: int = 0
    differing: dict[str, float] = field(default_factory=dict)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Bit-equal."""
        return not (self.differing or self.only_a or self.only_b)


def compare_tensors(a: Path, b: Path, step: int) -> TensorsComparison:
    """Compare two checkpoints of a step, tensor by tensor, after their checksums were found good.

    Args:
        a: folder of the first run's checkpoints.
        b: of the second's.
        step: of both.

    Raises:
        CheckpointError: one of them is damaged.
    """
    ours, theirs = (whole.read(CheckpointStore(folder), step) for folder in (a, b))
    differing = {}
    for name in sorted(ours.keys() & theirs.keys()):
        largest = _largest(ours[name], theirs[name])
        if largest is not None:
            differing[name] = largest
    return TensorsComparison(
        len(ours.keys() & theirs.keys()),
        dict(sorted(differing.items(), key=lambda item: -item[1])),
        sorted(ours.keys() - theirs.keys()),
        sorted(theirs.keys() - ours.keys()),
    )


def _largest(a: Tensor, b: Tensor) -> float | None:
    """Largest difference of an entry; None where all bits are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)):
        return None
    difference = (a.double() - b.double()).abs()
    return difference.nan_to_num(nan=float("inf")).max().item()
