"""The arithmetic of layouts, against the worked example and the definition."""

import itertools

import pytest

from moeflow.errors import ConfigError
from moeflow.schema.layout import AXES, DENSE_AXES, EXPERT_AXES, Layout


def groups(layout, axis):
    return [list(group) for group in layout.groups(axis)]


def test_the_worked_example():
    layout = Layout(8, pp=2, tp=2, ep=4)
    assert groups(layout, "tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(layout, "dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(layout, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(layout, "pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.edp == 1


def test_megatron_cores_table_for_sixteen_ranks():
    """Groups that Megatron-Core makes for world 16, pp 2, tp 2, ep 4, with etp 1 and 2."""
    layout = Layout(16, pp=2, tp=2, ep=4)
    assert groups(layout, "dp") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert groups(layout, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups(layout, "edp") == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    cut = Layout(16, pp=2, tp=2, ep=4, etp=2)
    assert groups(cut, "etp") == [[i, i + 1] for i in range(0, 16, 2)]
    assert groups(cut, "ep") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert cut.edp == 1


def all_layouts(world):
    for pp, tp, ep, etp in itertools.product(range(1, world + 1), repeat=4):
        try:
            yield Layout(world, pp, tp, ep, etp)
        except ConfigError:
            continue


@pytest.mark.parametrize("world", [1, 2, 6, 8, 12])
def test_every_layout_covers_each_rank_once_on_every_axis(world):
    seen = 0
    for layout in all_layouts(world):
        seen += 1
        assert layout.pp * layout.dp * layout.tp == world
        assert layout.dp * layout.tp == layout.edp * layout.ep * layout.etp
        for axis in AXES:
            members = [rank for group in layout.groups(axis) for rank in group]
            assert sorted(members) == list(range(world))
        for grid in (DENSE_AXES, EXPERT_AXES):
            coordinates = {tuple(layout.coordinate(rank, axis) for axis in grid) for rank in range(world)}
            assert len(coordinates) == world
            # The last axis runs fastest.
            by_coordinates = sorted(range(world), key=lambda r: [layout.coordinate(r, axis) for axis in grid])
            assert by_coordinates == list(range(world))
        for rank in range(world):
            stage = set(layout.stage_group(rank))
            for axis in ("dp", "tp", "edp", "ep", "etp"):
                assert set(layout.group(rank, axis)) <= stage
    assert seen > 0


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ({"world": 4, "pp": 3}, "parallel.pp=3", "valid: 1, 2, 4"),
        ({"world": 8, "pp": 2, "tp": 3}, "parallel.tp=3", "valid: 1, 2, 4"),
        ({"world": 8, "ep": 3}, "parallel.ep=3", "valid: 1, 2, 4, 8"),
        ({"world": 8, "ep": 8, "etp": 2}, "parallel.ep=8", "valid: 1, 2, 4"),
        ({"world": 8, "etp": 16}, "parallel.etp=16", "valid: 1, 2, 4, 8"),
        ({"world": 8, "tp": 0}, "parallel.tp=0", "valid: 1, 2, 4, 8"),
    ],
)
def test_what_does_not_divide_is_named_with_what_would(arguments, key, value):
    with pytest.raises(ConfigError) as error:
        Layout(**arguments)
    assert key in str(error.value)
    assert value in str(error.value)


def test_a_hundred_thousand_ranks_take_no_time():
    layout = Layout(98304, pp=8, tp=4, ep=96, etp=2)
    assert list(layout.group(98303, "tp")) == [98300, 98301, 98302, 98303]
    assert len(layout.stage_group(0)) == 12288
