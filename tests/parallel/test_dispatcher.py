"""Dispatch over ranks: rows back where they came from, gradients of the collectives."""

import pytest
import torch

from moeflow.parallel import collectives
from moeflow.parallel.dispatcher import RankDispatcher
from moeflow.parallel.topology import Topology
from moeflow.schema import ParallelConfig
from tests.distributed import run_ranks


def rows_of(rank: int, counts: list[int]) -> torch.Tensor:
    """Rows that say where they come from and which expert they want: [rank, expert, number]."""
    return torch.tensor([[rank, e, i] for e, n in enumerate(counts) for i in range(n)], dtype=torch.float64).view(-1, 3)


def round_trip(parallel: dict, tables: list[list[int]]) -> None:
    topology = Topology.create(ParallelConfig(**parallel), 30.0)
    rank = topology.rank
    dispatcher = RankDispatcher(topology)
    counts = torch.tensor(tables[rank])
    rows = rows_of(rank, tables[rank]).requires_grad_()
    here, per_expert, way = dispatcher.dispatch(rows, counts)
    ep, etp = topology["ep"], topology["etp"]
    local = len(tables[0]) // ep.size
    peers = [
        r for r in range(len(tables)) if topology.layout.coordinate(r, "edp") == topology.layout.coordinate(rank, "edp")
    ]
    wanted = range(ep.rank * local, (ep.rank + 1) * local)
    assert per_expert.tolist() == [sum(tables[r][e] for r in peers) for e in wanted]
    # Every row stands with its expert.
    experts = torch.repeat_interleave(torch.tensor(list(wanted)), per_expert)
    assert torch.equal(here[:, 1].long(), experts)
    assert sorted(map(tuple, here.tolist())) == sorted(
        (float(r), float(e), float(i)) for r in peers for e in wanted for i in range(tables[r][e])
    )
    back = dispatcher.combine(here * 2, way)
    # Each etp rank adds its part; here all parts are alike.
    torch.testing.assert_close(back, rows * 2 * etp.size)
    upstream = torch.arange(rows.numel(), dtype=torch.float64).view_as(rows) + rank
    back.backward(upstream)
    torch.testing.assert_close(rows.grad, upstream * 2 * etp.size)


UNEVEN = [[3, 0, 1, 2], [0, 0, 0, 0], [0, 5, 0, 0], [1, 1, 1, 1]]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {"ep": 2}), (2, {"etp": 2}), (4, {"ep": 4}), (4, {"ep": 2}), (4, {"ep": 2, "etp": 2})],
)
def test_rows_reach_their_expert_and_come_back(world, parallel):
    run_ranks(round_trip, world, parallel, UNEVEN[:world], timeout=60)


def batch_mean_of_parts() -> None:
    topology = Topology.create(ParallelConfig(), 30.0)
    group = topology["stage"]
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    data = torch.arange(6, dtype=torch.float64).view(2, 3)
    mean = collectives.batch_mean(data[topology.rank] * weight, group)
    torch.testing.assert_close(mean, data.mean(0))
    loss = (mean**2).sum()
    loss.backward()
    grad = collectives.all_reduce(weight.grad.clone(), group) / group.size
    torch.testing.assert_close(grad, 2 * data.mean(0) ** 2)


@pytest.mark.distributed
def test_mean_of_gradients_through_batch_mean_is_the_gradient_of_the_whole():
    run_ranks(batch_mean_of_parts, 2, timeout=60)


def own_groups() -> dict[str, list[int]]:
    topology = Topology.create(ParallelConfig(pp=1, tp=2, ep=4), 30.0)
    return {name: list(group.ranks) for name, group in topology.groups.items()}


@pytest.mark.distributed
def test_groups_are_those_of_the_layout():
    found = run_ranks(own_groups, 4, timeout=60)
    assert [g["tp"] for g in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [g["dp"] for g in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(g["ep"] == g["stage"] == g["world"] == [0, 1, 2, 3] for g in found)
