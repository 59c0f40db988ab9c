"""Fewer points for a picture, and nothing hidden: each point knows the smallest and largest value it stands for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeflow.report.reading import Series

#: Points of a line: about one for each pixel that it is wide.
POINTS = 300


@dataclass(frozen=True, slots=True)
class Thinned:
    """A line of at most as many points as asked for.

    Attributes:
        steps: float64 [N], mean step of each bucket.
        mean: float64 [N].
        low: float64 [N], smallest value of the bucket.
        high: float64 [N], largest one.
        most: values in the fullest bucket; 1 where every value is drawn.
        total: values that went in.
        left_out: values that are not finite.
    """

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    most: int
    total: int
    left_out: int


def thin(series: Series, points: int = POINTS) -> Thinned:
    """Put the values of a series into buckets of equal width in steps.

    Args:
        series: of finite and other values; the others are counted and left out.
        points: largest number of buckets; with no more values than that each is a bucket of its own.
    """
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    left_out = len(series.values) - len(values)
    if len(values) <= points:
        as_float = steps.astype(np.float64)
        return Thinned(as_float, values, values, values, min(1, len(values)), len(values), left_out)
    starts = bucket_starts(steps, points)
    counts = np.diff(np.append(starts, len(steps)))
    return Thinned(
        np.add.reduceat(steps.astype(np.float64), starts) / counts,
        np.add.reduceat(values, starts) / counts,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
        int(counts.max()),
        len(values),
        left_out,
    )


def bucket_starts(steps: np.ndarray, points: int) -> np.ndarray:
    """Index of the first element of each bucket that holds any, for `points` buckets of equal width in steps."""
    first, last = int(steps[0]), int(steps[-1])
    bucket = (steps - first) * points // (last - first + 1)
    return np.flatnonzero(np.diff(bucket, prepend=-1))


def told(lines: list[Thinned]) -> str:
    """What a caption says about the way from the values to the picture; empty where every value is drawn."""
    most = max((line.most for line in lines), default=1)
    parts = []
    if most > 1:
        longest = max(lines, key=lambda line: line.total)
        parts.append(
            f"{longest.total:,} values drawn as {len(longest.steps)} points: the line is the mean of up to {most} of "
            "them, the band reaches from the smallest to the largest."
        )
    left_out = sum(line.left_out for line in lines)
    if left_out:
        parts.append(f"{left_out:,} value{'s' * (left_out > 1)} not finite (NaN or infinite), not drawn.")
    return " ".join(parts)
