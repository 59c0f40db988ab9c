"""Pieces of a flat vector on the ranks of a group, and the whole parameters that a checkpoint wants."""

import math
import random

import pytest
import torch

from moeflow.parallel.engines.fragments import Fragments, Span
from moeflow.parallel.topology import Group, Topology
from moeflow.schema import ParallelConfig
from tests.distributed import run_ranks


def spans_of(seed, ranks):
    """Parameters of all sizes one after another, with gaps between some; and the size of a piece."""
    draw, spans, end = random.Random(seed), [], 0
    for number in range(9):
        end += draw.choice((0, 0, 3))
        shape = torch.Size(draw.choice(((), (1,), (5,), (3, 4), (2, 3, 7), (40,))))
        spans.append(Span(f"p{number}", shape, end, math.prod(shape)))
        end += math.prod(shape)
    piece = -(-end // ranks) + draw.choice((0, 2))
    return spans, piece, piece * ranks


def there_and_back(seed):
    topology = Topology.create(ParallelConfig(), 60.0)
    dp = topology["dp"]
    spans, piece, total = spans_of(seed, dp.size)
    flat = torch.arange(total, dtype=torch.float64)
    fragments = Fragments(dp, piece, spans)
    own = flat[dp.rank * piece : (dp.rank + 1) * piece].clone()
    whole = fragments.gather(own)
    exact = all(whole[s.name].equal(flat[s.start : s.start + s.size].view(s.shape)) for s in fragments.owned())
    assert whole.keys() == {span.name for span in fragments.owned()} and exact
    back = torch.full_like(own, -1.0)
    fragments.scatter({name: tensor + 0.5 for name, tensor in whole.items()}, back)
    inside = torch.zeros(total, dtype=torch.bool)
    for span in spans:
        inside[span.start : span.start + span.size] = True
    mine = inside[dp.rank * piece : (dp.rank + 1) * piece]
    # Padding is left alone.
    assert back[mine].equal(own[mine] + 0.5) and (back[~mine] == -1.0).all()
    return sorted(whole)


@pytest.mark.distributed
@pytest.mark.parametrize("seed", range(3))
def test_whole_parameters_come_from_pieces_and_go_back(seed):
    owned = run_ranks(there_and_back, 3, seed, timeout=60)
    assert sorted(name for names in owned for name in names) == [f"p{number}" for number in range(9)]


def test_one_rank_needs_nobody():
    fragments = Fragments(
        Group("dp", (0,), 0), 10, [Span("a", torch.Size((2, 3)), 0, 6), Span("b", torch.Size(()), 8, 1)]
    )
    flat = torch.arange(10.0)
    assert fragments.gather(flat)["b"].item() == 8.0
    assert fragments.gather(flat)["a"].equal(flat[:6].view(2, 3))
