"""Two runs side by side: metrics row by row, checkpoints file by file.  No torch; `same_tensors` compares values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moeflow.train import manifest
from moeflow.train.metrics import read_rows, without_timing
from moeflow.train.shelf import Shelf

Row = dict[str, Any]


@dataclass(slots=True)
class Difference:
    """One figure of one step in both runs.

    Attributes:
        step: of the row.
        key: of the figure.
        a: value in the first run; None where it has none.
        b: value in the second.
    """

    step: int
    key: str
    a: float | str | None
    b: float | str | None

    @property
    def by(self) -> float | None:
        """|a - b|; None where one of them is no finite number."""
        a, b = _float(self.a), _float(self.b)
        return None if a is None or b is None or not math.isfinite(a - b) else abs(a - b)


@dataclass(slots=True)
class MetricsComparison:
    """How two metrics.jsonl differ.

    Attributes:
        common: steps that both have rows of.
        only_a: steps that only the first has.
        only_b: steps that only the second has.
        first: differences of the first step that has any.
        differing: common steps with a difference.
        largest: figure -> its largest difference over all common steps.
    """

    common: int = 0
    only_a: list[int] = field(default_factory=list)
    only_b: list[int] = field(default_factory=list)
    first: list[Difference] = field(default_factory=list)
    differing: int = 0
    largest: dict[str, Difference] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Bit-equal: the same rows, apart from wall-clock time."""
        return not self.first and not self.only_a and not self.only_b


def compare_metrics(a: Path, b: Path) -> MetricsComparison:
    """Compare two metrics.jsonl, apart from wall-clock time.

    JSON states each number so that reading it gives the same bits back, so equal numbers are equal bits.
    """
    ours, theirs = _by_step(read_rows(a)), _by_step(read_rows(b))
    result = MetricsComparison(
        common=len(ours.keys() & theirs.keys()),
        only_a=sorted(ours.keys() - theirs.keys()),
        only_b=sorted(theirs.keys() - ours.keys()),
    )
    for step in sorted(ours.keys() & theirs.keys()):
        found = _differences(step, ours[step], theirs[step])
        result.differing += bool(found)
        result.first = result.first or found
        for difference in found:
            known = result.largest.get(difference.key)
            if known is None or (difference.by or 0.0) > (known.by or 0.0):
                result.largest[difference.key] = difference
    return result


def _by_step(rows: Iterable[Row]) -> dict[int, Row]:
    """Step -> figures: the training row and the evaluation row of a step are one."""
    found: dict[int, Row] = {}
    for row in rows:
        found.setdefault(row["step"], {}).update(without_timing(row))
    return found


def _differences(step: int, a: Row, b: Row) -> list[Difference]:
    return [Difference(step, key, a.get(key), b.get(key)) for key in {**a, **b} if not _same(a.get(key), b.get(key))]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)
    return type(a) is type(b) and a == b


def _float(value: Any) -> float | None:
    try:
        return float(value)  # "NaN" and "Infinity" too
    except (TypeError, ValueError):
        return None


@dataclass(slots=True)
class FilesComparison:
    """How the files of two checkpoints of one step differ, by their manifests.

    Attributes:
        step: of both.
        same_tensors: whether the files that hold tensors are the same, bit by bit.
        other_files: names of further files that differ (random generators, meta data).
        worlds: number of ranks that saved each.
    """

    step: int
    same_tensors: bool
    other_files: list[str]
    worlds: tuple[int, int]


def compare_files(a: Shelf, b: Shelf, step: int) -> FilesComparison:
    """Compare the checksums in two manifests.

    Raises:
        CheckpointError: a manifest is missing or damaged.
    """
    ours, theirs = manifest.read(a.path(step)), manifest.read(b.path(step))
    tensors = [_chosen(content["files"], tensors=True) for content in (ours, theirs)]
    others = [_chosen(content["files"], tensors=False) for content in (ours, theirs)]
    differing = sorted(name for name in {**others[0], **others[1]} if others[0].get(name) != others[1].get(name))
    return FilesComparison(step, tensors[0] == tensors[1], differing, (int(ours["world"]), int(theirs["world"])))


def _chosen(files: Mapping[str, Any], tensors: bool) -> dict[str, Any]:
    return {name: entry for name, entry in files.items() if name.endswith((".distcp", ".metadata")) == tensors}
