"""Routing traces: recorded ones, and synthetic ones with a given skew and drift.

Legend: S samples (steps), R ranks, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeflow.errors import DataError


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows that ranks had for experts.

    Attributes:
        counts: int64 [S, R, L, E].
        iteration: int64 [S] training step of each sample, ascending.
    """

    counts: NDArray[np.int64]
    iteration: NDArray[np.int64]


def load_trace(path: str | Path) -> Trace:
    """Read an .npz with `counts` [S, R, L, E] and `iteration` [S].

    Raises:
        DataError: the file is missing, or holds something else.
    """
    try:
        with np.load(path) as file:
            counts, iteration = file["counts"].astype(np.int64), file["iteration"].astype(np.int64)
    except (OSError, KeyError, ValueError) as error:
        raise DataError(
            f"{path} is no routing trace: {error}", "an .npz with counts [S, R, L, E], iteration [S]"
        ) from None
    if counts.ndim != 4 or iteration.shape != counts.shape[:1] or (counts < 0).any():
        raise DataError(
            f"{path} is no routing trace: counts {counts.shape}, iteration {iteration.shape}",
            "counts [S, R, L, E] not below 0 and iteration [S]",
        )
    return Trace(counts, iteration)


def zipf(experts: int, skew: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """[E] shares proportional to 1 / rank^skew, in random order; 0 is even."""
    shares = 1.0 / np.arange(1, experts + 1) ** skew
    return rng.permutation(shares / shares.sum())


def drifting(
    experts: int, skew: float, drift: float, rng: np.random.Generator, leading: tuple[int, ...] = ()
) -> Iterator[NDArray[np.float64]]:
    """Endless [..., E] shares: a Zipf law whose logarithms wander and are drawn back to it by a hundredth a step.

    Args:
        experts: E.
        skew: exponent.
        drift: deviation of the logarithm's step.
        rng: source of chance.
        leading: further dimensions (layers), each with a law and a drift of its own.
    """
    size = int(np.prod(leading, dtype=np.int64))
    home = np.log(np.stack([zipf(experts, skew, rng) for _ in range(size)])).reshape(*leading, experts)
    now = home.copy()
    while True:
        shares = np.exp(now - now.max(-1, keepdims=True))
        yield shares / shares.sum(-1, keepdims=True)
        now += 0.01 * (home - now) + drift * rng.standard_normal(now.shape)


def draw_counts(
    shares: NDArray[np.float64], ranks: int, rows: int, rng: np.random.Generator, chunk: int = 4096
) -> NDArray[np.int64]:
    """[R, E] rows of each rank for each expert, `rows` a rank.

    Few ranks are drawn exactly (multinomial).  For many, the normal law with the same means and variances, rounded,
    which is a hundred times faster; a rank's rows then sum to `rows` but for a few.
    """
    if ranks <= 256:
        return rng.multinomial(rows, shares, size=ranks).astype(np.int64)
    mean = rows * shares
    deviation = np.sqrt(mean * (1.0 - shares)).astype(np.float32)
    out = np.empty((ranks, len(shares)), dtype=np.int64)
    for start in range(0, ranks, chunk):
        noise = rng.standard_normal((min(chunk, ranks - start), len(shares)), dtype=np.float32)
        out[start : start + chunk] = np.maximum(np.rint(mean + noise * deviation), 0)
    return out
