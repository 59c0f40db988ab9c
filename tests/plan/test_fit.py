"""Coefficients are found again from times that the model made with them, with and without noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moeflow.plan.cost import ExpertShape, broadcast_s, products_s
from moeflow.plan.fit import fit_link, fit_products, fit_tree_growth, line
from moeflow.plan.profile import DEFAULTS, Link

SIZES = np.logspace(3, 9, 13)


def noisy(values, percent=3):
    return np.asarray(values) * np.random.default_rng(0).normal(1, percent / 100, len(values))


def test_a_link():
    link = Link(2e-5, 4e9)
    times = link.latency_s + SIZES / link.bytes_per_s
    for measured, tolerance in ((times, 1e-6), (noisy(times), 0.05)):
        found = fit_link(SIZES, measured)
        assert found.latency_s == pytest.approx(link.latency_s, rel=tolerance)
        assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=tolerance)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_products(gated, backward):
    profile, shape = DEFAULTS["a100"], ExpertShape(4096, 8192, gated, "bf16")
    rows = np.array([512, 1024, 2048, 4096, 8192, 16384])
    times = products_s(profile, shape, rows.astype(float), backward)
    for measured, tolerance in ((times, 1e-6), (noisy(times, 1), 0.2)):
        rate, half = fit_products(rows, measured, shape, profile.launch_s, backward)
        assert rate == pytest.approx(profile.rate("bf16"), rel=tolerance / 5)
        assert half == pytest.approx(profile.half_rows, rel=tolerance)


@pytest.mark.parametrize("growth", [0.0, 0.4, 1.0])
def test_growth_of_a_broadcast(growth):
    link, profile = Link(1e-5, 1e9), replace(DEFAULTS["cpu"], tree_growth=growth)
    ranks = [2, 4, 8, 16]
    times = [broadcast_s(profile, link, n, 1e7) for n in ranks]
    assert fit_tree_growth(ranks, times, 1e7, link) == pytest.approx(growth)


def test_neither_part_of_a_line_is_negative():
    assert line([1.0, 2.0, 3.0], [0.9, 2.0, 3.1])[0] == 0.0
    start, slope = line([1.0, 2.0, 3.0], [2.1, 2.0, 1.9])
    assert slope == 0.0 and start == pytest.approx(2.0, rel=0.01)
