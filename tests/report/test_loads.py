"""Loads in buckets against a slow loop, dead experts, and the colors of the maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeflow.report.loads import NOTHING, _colors, bin_loads, idle_experts, idle_html
from moeflow.report.reading import LayerHistory, RunData


def run_with(tokens: np.ndarray, steps: np.ndarray | None = None, layers: int = 1) -> RunData:
    rows = len(tokens)
    history = LayerHistory(
        np.arange(1, rows + 1) if steps is None else steps, tokens, np.linspace(0, 0.5, rows), np.linspace(1, 2, rows)
    )
    return RunData(Path("run"), "A", layers={f"blocks.{n}.moe": history for n in range(layers)})


def test_loads_are_shares_of_the_mean_in_each_bucket():
    rng = np.random.default_rng(0)
    tokens = rng.poisson(20, (1000, 8))
    run = run_with(tokens)
    binned = bin_loads(run)
    assert len(binned.first) == 200
    assert binned.most == 5
    for place in (0, 57, 199):
        inside = [n for n in range(1000) if binned.first[place] <= n + 1 <= binned.last[place]]
        assert len(inside) == 5
        slow = [[count / (sum(row) / 8) for count in row] for row in tokens[inside].tolist()]
        np.testing.assert_allclose(binned.loads[0][place], np.mean(slow, axis=0))
        np.testing.assert_allclose(binned.entropy[place, 0], np.mean([1 + n / 999 for n in inside]))


def test_rows_that_grow_rarer_keep_their_places():
    steps = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    binned = bin_loads(run_with(np.ones((10, 4), np.int64), steps))
    assert binned.first.tolist() == steps.tolist()
    assert binned.last.tolist() == steps.tolist()


def test_many_experts_and_many_runs_get_fewer_columns():
    tokens = np.ones((500, 256), np.int64)
    few, many = bin_loads(run_with(tokens, layers=58)), bin_loads(run_with(tokens, layers=58), runs=8)
    assert len(few.first) * 256 * 58 < 1_100_000
    assert len(many.first) == 20


def test_a_step_without_any_choice_is_even():
    assert bin_loads(run_with(np.zeros((3, 4), np.int64))).loads[0].tolist() == [[1.0] * 4] * 3


@pytest.mark.parametrize(("column", "steps"), [([0, 0, 0, 0, 0], 4), ([1, 0, 0, 0, 0], 3), ([1, 1, 1, 1, 0], 0)])
def test_dead_experts_are_named_with_how_long(column, steps):
    tokens = np.ones((5, 3), np.int64)
    tokens[:, 2] = column
    run = run_with(tokens)
    assert idle_experts(run) == [("blocks.0.moe", 2, steps)]
    assert "expert 2 of <code>blocks.0.moe</code>" in idle_html(run, many=False)


def test_an_expert_with_a_token_at_the_end_is_alive():
    tokens = np.zeros((5, 3), np.int64)
    tokens[-1] = 1
    assert idle_experts(run_with(tokens)) == []


def test_nothing_has_a_color_of_its_own_and_more_is_brighter():
    colors = _colors(np.array([0.0, 1e-6, 0.5, 1.0, 2.0, 9.0]), 2.0)
    assert "#" + bytes(colors[0]).hex() == NOTHING
    light = colors[1:].astype(float) @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light[:4]) > 0).all()
    assert np.array_equal(colors[4], colors[5])
