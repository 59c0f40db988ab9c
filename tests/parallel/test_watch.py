"""A collective that cannot finish says which one, and who is missing; nobody hangs."""

import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moeflow.errors import CollectiveError
from moeflow.models import build_model
from moeflow.parallel import collectives
from moeflow.parallel.dispatcher import RankDispatcher
from moeflow.parallel.parallelize import parallelize
from moeflow.parallel.pipeline import Pipeline, keep_own_layers, own_ranges, stage_ranges
from moeflow.parallel.topology import Topology
from moeflow.schema import GPTConfig, NaiveGateConfig, ParallelConfig
from tests.distributed import run_ranks

LIMIT_S = 3.0


def join(**parallel) -> Topology:
    """The topology of a rank whose collectives may take LIMIT_S seconds."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    return Topology.create(ParallelConfig(**parallel), LIMIT_S)


def message_of(action) -> str:
    started = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        action()
    assert time.monotonic() - started < 25
    return str(caught.value)


def one_rank_stays_away() -> str:
    topology = join()
    if topology.rank == 1:
        time.sleep(8)
        return ""
    return message_of(lambda: collectives.all_reduce(torch.ones(4), topology["stage"]))


@pytest.mark.distributed
def test_a_rank_that_does_not_come_is_named():
    message = run_ranks(one_rank_stays_away, 3, timeout=40, init=False)[0]
    assert "all-reduce over the stage group (ranks 0, 1, 2) did not finish" in message
    assert "arrived: 0, 2" in message
    assert "did not arrive: 1" in message


def one_rank_starts_no_chunk() -> str:
    topology = join(ep=3)
    group, rank = topology["ep"], topology.rank
    if rank == 1:
        time.sleep(8)
        return ""

    def exchanged() -> None:
        rows = {other: torch.ones(4, 2) for other in range(3) if other != rank}
        collectives.start(rows, {other: torch.empty(4, 2) for other in rows}, group, 0).wait()

    return message_of(exchanged)


@pytest.mark.distributed
def test_a_rank_that_sends_no_chunk_is_named():
    message = run_ranks(one_rank_starts_no_chunk, 3, timeout=40, init=False)[0]
    assert "exchange of rows in chunks over the ep group (ranks 0, 1, 2) did not finish" in message
    assert "did not arrive: 1" in message


def ranks_in_different_collectives() -> str:
    topology = join(ep=2)
    other = Topology.create(ParallelConfig(tp=2), 3.0)
    if topology.rank == 0:
        return message_of(lambda: collectives.all_reduce(torch.ones(4), topology["ep"]))
    return message_of(lambda: collectives.all_gather(torch.ones(4), other["tp"]))


@pytest.mark.distributed
def test_a_rank_that_waits_elsewhere_is_named_with_its_collective():
    first, second = run_ranks(ranks_in_different_collectives, 2, timeout=40, init=False)
    assert "arrived: 0; rank 1 waits in all-gather over its tp group instead" in first
    assert "arrived: 1; rank 0 waits in all-reduce over its ep group instead" in second


def ranks_with_other_numbers_of_experts() -> str:
    topology = join(ep=2)
    dispatcher = RankDispatcher(topology)
    counts = torch.ones(4 if topology.rank == 0 else 6, dtype=torch.int64)
    return message_of(lambda: dispatcher.dispatch(torch.ones(int(counts.sum()), 8), counts))


@pytest.mark.distributed
def test_ranks_that_disagree_on_the_number_of_experts_are_told():
    messages = run_ranks(ranks_with_other_numbers_of_experts, 2, timeout=40, init=False)
    for message in messages:
        assert "disagree on the shape of an MoE layer" in message
        assert "rank 0: {'experts': 4" in message
        assert "rank 1: {'experts': 6" in message


def ranks_with_other_models(what: str) -> str:
    topology = join(ep=2) if what == "experts" else join(tp=2)
    own, other = (4, 6) if what == "experts" else (32, 48)
    size = own if topology.rank != 1 else other
    config = GPTConfig(num_layers=2, d_model=32, num_heads=4, d_hidden=32, num_experts=4, vocab_size=64)
    config = replace(config, **{"num_experts" if what == "experts" else "d_hidden": size})
    with torch.device("meta"):
        model = build_model(config, NaiveGateConfig())
    return message_of(lambda: parallelize(model, topology, 0, torch.device("cpu")))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("experts", "gate.proj.weight: [4, 32] on rank 0, 2, 3; [6, 32] on rank 1"),
        ("width", "experts.w_in: [4, 2, 16, 32] on rank 0, 2, 3; [4, 2, 24, 32] on rank 1"),
    ],
)
def test_ranks_that_disagree_on_a_shape_are_told_before_anything_is_sent(what, told):
    for message in run_ranks(ranks_with_other_models, 4, what, timeout=60, init=False):
        assert f"the ranks of the stage group disagree on the shape of blocks.0.mlp.{told}" in message


def stages_with_other_widths() -> str:
    topology = join(pp=2)
    config = GPTConfig(num_layers=2, d_model=32 + 16 * topology.rank, num_heads=4, d_hidden=32, num_experts=4)
    config = replace(config, vocab_size=64)
    with torch.device("meta"):
        model = build_model(config, NaiveGateConfig())
    parallel = ParallelConfig(pp=2)
    ranges = stage_ranges(model, parallel)
    stages = own_ranges(ranges, topology)
    keep_own_layers(model, stages)
    part = parallelize(model, topology, 0, torch.device("cpu"))
    pipeline = Pipeline(
        part.model, stages, 2, topology, parallel, 2, lambda out, _: out.mean(), torch.device("cpu"), nullcontext
    )
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    return message_of(lambda: pipeline.train(tokens, tokens))


@pytest.mark.distributed
def test_stages_that_disagree_on_what_goes_between_them_are_told():
    for message in run_ranks(stages_with_other_widths, 2, timeout=60, init=False):
        assert "the ranks of the pp group disagree on the shapes that the pipeline sends" in message
        assert "rank 0: {'micro-batches': 2, 'between stages': (2, 8, 32)}" in message
        assert "rank 1: {'micro-batches': 2, 'between stages': (2, 8, 48)}" in message


def test_the_reason_is_short():
    from moeflow.parallel import watch

    long = (
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4733. This is "
    )
    error = RuntimeError(long + "typically caused by a remote worker crashing.")
    assert watch._reason(error) == "Connection closed by peer [10.0.0.1]:4733"
    assert watch._reason(RuntimeError()) == "RuntimeError"
