"""The lines of the live view, at any size, and its drawings."""

from __future__ import annotations

import math

import pytest

from moeflow.train.view import ASCII, BLOCKS, Curve, View, load_strip, sparkline


def view(layers: int = 2, experts: int = 8) -> View:
    made = View(1000)
    for step in range(1, 50):
        made.add({"loss": 1 / step, "accuracy": step / 50, "lr": 1e-3}, {
            f"transformer.blocks.{layer}.mlp": [0 if expert == layer else 10 + expert for expert in range(experts)]
            for layer in range(layers)
        })  # fmt: skip
    return made


@pytest.mark.parametrize("width", [1, 2, 5, 10, 20, 39, 79, 200])
@pytest.mark.parametrize("height", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("signs", [BLOCKS, ASCII])
def test_lines_fit_whatever_the_size(width, height, signs):
    lines = view(12, 64).lines(500, "loss 0.1  " * 20, "eta 1:00", width, height, signs)
    assert 1 <= len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    assert all("\n" not in line.plain for line in lines)


def test_what_comes_first_where_there_is_little_room():
    lines = [[line.plain for line in view().lines(500, "METRICS", "eta 1:00", 79, height)] for height in range(1, 8)]
    assert [len(each) for each in lines] == [1, 2, 3, 4, 5, 6, 6]
    assert all(each[0].startswith("step  500/1000  ") for each in lines)
    assert all(each[0].endswith("  50%  eta 1:00") for each in lines)
    assert [each[1] for each in lines[1:]] == ["METRICS"] * 6
    for each in lines[2:]:
        assert any(".mlp" in line for line in each), "loads are never left out for a curve"
    assert lines[-1][2].startswith("loss ")
    assert lines[-1][3].startswith("accuracy ")


def test_the_layers_with_dead_experts_come_first_where_not_all_fit():
    made = View(10)
    made.add({"loss": 1.0}, {"even": [5, 5], "worse": [1, 9], "dead": [0, 10], "odd": [4, 6]})
    shown = [line.plain.split()[0] for line in made.lines(1, "", "", 79, 4)[2:]]
    assert shown == ["worse", "dead"]


def test_a_sparkline_is_scaled_and_thinned():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8, ASCII) == ASCII.ramp
    assert sparkline([0, 0, 7, 7], 2, ASCII) == ASCII.ramp[0] + ASCII.ramp[-1]
    assert sparkline([5.0, 5.0], 8, ASCII) == ASCII.ramp[0] * 2
    assert sparkline([0.0, math.nan, 1.0, math.inf], 8, ASCII) == "_!#!"
    assert sparkline([math.nan], 8, ASCII) == "!"


def test_a_strip_shows_the_mean_at_half_height_and_dead_experts_by_a_sign_of_their_own():
    assert load_strip([5, 5, 5, 5], 8, ASCII) == "===="
    assert load_strip([10, 0, 5, 5], 8, ASCII) == "#.=="
    assert load_strip([40, 0, 0, 0], 8, ASCII) == "#..."
    assert load_strip([0, 0], 8, ASCII) == ".."
    assert load_strip([5] * 63 + [0], 8, ASCII) == "=======."


def test_the_dead_are_counted_where_they_cannot_all_be_named():
    made = View(10)
    made.add({}, {"moe": [100] + [0] * 99})
    line = made.lines(1, "", "", 79, 3)[-1].plain
    assert ", 99 dead: 1 2 3" in line
    assert line.endswith(BLOCKS.cut)


def test_a_curve_of_any_length_keeps_its_shape_in_little_memory():
    curve = Curve(most=8)
    for value in range(1000):
        curve.add(float(value))
    points = curve.points()
    assert len(points) <= 9
    assert points == sorted(points)
    assert (curve.first, curve.last) == (0.0, 999.0)
    assert points[0] < 130
    assert points[-1] > 870
