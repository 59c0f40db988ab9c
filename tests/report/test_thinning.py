"""Thinned lines against a slow loop: no value is hidden, and each stands in one bucket."""

from __future__ import annotations

import numpy as np
import pytest

from moeflow.report.reading import Series
from moeflow.report.thinning import thin, told


def series(count: int, seed: int = 0, gaps: bool = False) -> Series:
    rng = np.random.default_rng(seed)
    steps = np.sort(rng.choice(10 * count, count, replace=False)) if gaps else np.arange(1, count + 1)
    return Series(steps.astype(np.int64), rng.normal(size=count))


@pytest.mark.parametrize(("count", "points"), [(301, 300), (1000, 7), (10_000, 300), (50, 49)])
@pytest.mark.parametrize("gaps", [False, True])
def test_buckets_as_a_slow_loop_makes_them(count, points, gaps):
    given = series(count, gaps=gaps)
    buckets: dict[int, list[int]] = {}
    first, last = int(given.steps[0]), int(given.steps[-1])
    for place, step in enumerate(given.steps.tolist()):
        buckets.setdefault((step - first) * points // (last - first + 1), []).append(place)
    found = thin(given, points)
    assert len(found.steps) == len(buckets) <= points
    for number, places in enumerate(buckets.values()):
        values = given.values[places]
        assert found.mean[number] == pytest.approx(values.mean())
        assert (found.low[number], found.high[number]) == (values.min(), values.max())
        assert found.steps[number] == pytest.approx(given.steps[places].mean())
    assert found.most == max(map(len, buckets.values()))


def test_a_single_spike_is_in_the_band():
    given = series(10_000)
    given.values[4321] = 99.0
    assert thin(given).high.max() == 99.0


def test_few_values_stay_what_they_are():
    given = series(20)
    found = thin(given)
    assert np.array_equal(found.mean, given.values)
    assert (found.most, told([found])) == (1, "")


def test_values_that_are_not_finite_are_counted():
    given = series(400)
    given.values[[3, 7, 9]] = np.nan, np.inf, -np.inf
    found = thin(given)
    assert (found.left_out, found.total) == (3, 397)
    assert np.isfinite(found.mean).all()
    assert "397 values drawn as" in told([found])
    assert "3 values not finite" in told([found])


def test_nothing_at_all():
    assert len(thin(Series(np.zeros(0, np.int64), np.zeros(0))).steps) == 0
