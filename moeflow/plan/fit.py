"""From measured seconds to coefficients of a profile: what a calibration calls after it has timed things.

Fits weigh each point by its own time, so that a percent counts alike for short and for long ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moeflow.plan.cost import BACKWARD, ExpertShape
from moeflow.plan.profile import Link


def line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(start, slope) of seconds = start + slope * size, least squares of relative errors; neither is negative.

    Args:
        sizes: at least two different ones.
        seconds: measured, above 0.
    """
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    assert len(x) == len(y) >= 2 and len(set(sizes)) >= 2 and (y > 0).all(), "two sizes, and times above 0"
    start, slope = np.linalg.lstsq(np.stack([1 / y, x / y], axis=1), np.ones_like(y), rcond=None)[0]
    if start < 0:
        start, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    elif slope < 0:
        start, slope = float((1 / y).sum() / (1 / y**2).sum()), 0.0
    return float(start), float(slope)


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> Link:
    """Latency and bandwidth from messages of several sizes.

    Args:
        num_bytes: that the busiest rank sends or receives.
        seconds: of each exchange.
    """
    latency, slope = line(num_bytes, seconds)
    return Link(latency, 1.0 / slope if slope else float("inf"))


def fit_products(
    rows: Sequence[float], seconds: Sequence[float], shape: ExpertShape, launch_s: float, backward: bool = True
) -> tuple[float, float]:
    """(FLOP/s, half_rows) from one expert's products with several numbers of rows.

    Args:
        rows: enough that reading the weights is not what takes the time.
        seconds: of each.
        shape: of the expert.
        launch_s: seconds to start a product, measured with tiny ones.
        backward: whether the backward pass was timed too.
    """
    passes = 1 + (BACKWARD if backward else 0)
    start, slope = line(rows, seconds)
    products = passes * (3 if shape.gated else 2)
    rate = passes * shape.row_flops / slope if slope else float("inf")
    return rate, max(0.0, start - products * launch_s) / slope if slope else 0.0


def fit_tree_growth(ranks: Sequence[int], seconds: Sequence[float], num_bytes: float, link: Link) -> float:
    """How a broadcast grows with its group: 0 not at all, 1 with each level of a binomial tree (at most that).

    Args:
        ranks: sizes of the groups, at least one above 2.
        seconds: of each broadcast.
        num_bytes: that were broadcast.
        link: between the ranks.
    """
    levels = np.ceil(np.log2(np.asarray(ranks, dtype=np.float64)))
    once = num_bytes / link.bytes_per_s
    # seconds - levels * latency - once = growth * once * (levels - 1)
    left = np.asarray(seconds, dtype=np.float64) - levels * link.latency_s - once
    weight = once * (levels - 1)
    assert (weight > 0).any(), "a group of two has one level only"
    return float(np.clip((left * weight).sum() / (weight**2).sum(), 0.0, 1.0))
