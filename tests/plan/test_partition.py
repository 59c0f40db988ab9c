"""Stages of even cost, against every possible cut."""

import itertools
import random

import pytest

from moeflow.errors import ConfigError
from moeflow.plan.partition import partition


def dearest(sizes, costs, first, last):
    pieces, start = [], 0
    for size in sizes:
        pieces.append(sum(costs[start : start + size]))
        start += size
    pieces[0] += first
    pieces[-1] += last
    return max(pieces)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_better(seed):
    rng = random.Random(seed)
    costs = [rng.choice([1, 2, 5, 9]) for _ in range(rng.randint(1, 9))]
    parts = rng.randint(1, len(costs))
    first, last = rng.choice([0, 3]), rng.choice([0, 7])
    sizes = partition(costs, parts, first, last)
    assert len(sizes) == parts
    assert min(sizes) >= 1
    assert sum(sizes) == len(costs)
    n = len(costs)
    cuts = itertools.combinations(range(1, n), parts - 1)
    every = [[b - a for a, b in itertools.pairwise((0, *cut, n))] for cut in cuts]
    assert dearest(sizes, costs, first, last) == min(dearest(s, costs, first, last) for s in every)


def test_more_stages_than_layers_is_refused():
    with pytest.raises(ConfigError, match="3 pipeline stages: the model has 2 layers"):
        partition([1, 1], 3)
