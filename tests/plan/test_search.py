"""The planner: memory that adds up, times that follow the model, and layouts that the configuration accepts."""

from __future__ import annotations

import time
from dataclasses import fields, replace

import pytest

from moeflow.errors import ConfigError
from moeflow.plan.cluster import cluster_for
from moeflow.plan.cost import Grouping, even_exchange_s, exchange_s
from moeflow.plan.layouts import Candidate, candidates, critical_stages, stage_split
from moeflow.plan.memory import FP32, memory_of, stage_holding
from moeflow.plan.model_size import gpt_size
from moeflow.plan.profile import DEFAULTS
from moeflow.plan.search import fullest, search
from moeflow.plan.step_time import StepModel
from moeflow.schema import GPTConfig, NaiveGateConfig
from moeflow.schema.layout import Layout

SMALL = gpt_size(
    GPTConfig(vocab_size=1024, num_layers=8, d_model=512, num_heads=8, num_experts=16), NaiveGateConfig(), 256
)
# 1.77e12 parameters, 142e9 of them active: 96 blocks of 128 experts.
LARGE = gpt_size(
    GPTConfig(
        vocab_size=128_000, num_layers=96, d_model=12_288, num_heads=96, num_kv_heads=8, num_experts=128,
        expert_hidden=3840,
    ),
    NaiveGateConfig(top_k=8),
    4096,
)  # fmt: skip


def plan(world=16, pp=1, tp=1, ep=1, etp=1, micro=1, number=1, again=False, model=SMALL):
    split = stage_split(model.costs, model.head_cost, pp)
    return Candidate(world, pp, tp, ep, etp, micro, number, split, again)


@pytest.mark.parametrize("candidate", [plan(), plan(pp=4, tp=2, ep=4), plan(pp=2, tp=2, ep=2, etp=2), plan(ep=16)])
def test_what_the_ranks_hold_adds_up_to_the_model(candidate):
    """One tp group of each stage and one copy of each expert make the whole model."""
    total = 0
    for stage in range(candidate.pp):
        held = stage_holding(SMALL, candidate, stage)
        whole = sum(SMALL.layers[n].whole for n in held.layers)
        ends = SMALL.d_model if stage == candidate.pp - 1 else 0
        cut = held.dense - whole - ends
        total += whole + ends + cut * candidate.tp + held.experts * candidate.ep * candidate.etp
    # The last stage holds a second copy of the tied embedding.
    copies = SMALL.embedding if candidate.pp > 1 else 0
    assert total == SMALL.parameters + copies


def test_the_memory_table_adds_up_and_follows_its_causes():
    one = memory_of(SMALL, plan(ep=4, micro=4), "bf16", 0)
    assert one.total == sum(getattr(one, field.name) for field in fields(one))
    parameters = (one.dense_parameters + one.expert_parameters) // FP32
    assert (one.gradients, one.optimizer, one.half_copies) == (4 * parameters, 8 * parameters, 2 * parameters)
    assert memory_of(SMALL, plan(ep=8, micro=4), "bf16", 0).expert_parameters * 2 == one.expert_parameters
    assert memory_of(SMALL, plan(ep=4, micro=8), "bf16", 0).activations == pytest.approx(2 * one.activations, rel=1e-6)
    assert memory_of(SMALL, plan(ep=4, micro=4, again=True), "bf16", 0).activations < one.activations / 3
    assert memory_of(SMALL, plan(ep=4, micro=4), "fp32", 0).half_copies == 0
    assert memory_of(SMALL, plan(ep=4, micro=4), "bf16", 0, imbalance=2.0).activations > one.activations


def test_early_stages_keep_more_micro_batches():
    long = plan(pp=4, ep=4, number=8)
    sizes = [memory_of(SMALL, long, "fp32", stage).activations for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(4 * sizes[3] * long.split[0] / long.split[3], rel=1e-3)
    few = plan(pp=4, ep=4, number=2)
    assert memory_of(SMALL, few, "fp32", 0).activations < sizes[0]


def test_critical_stages_hide_no_fuller_one():
    config = GPTConfig(
        vocab_size=4096, num_layers=12, d_model=256, num_heads=4, num_experts=8, moe_every=3, first_dense=2
    )
    model = gpt_size(config, NaiveGateConfig(), 128)
    for pp in (2, 3, 4, 6):
        candidate = plan(12, pp=pp, number=4, model=model)
        every = [memory_of(model, candidate, "fp32", stage).total for stage in range(pp)]
        assert max(every) == max(every[stage] for stage in critical_stages(model, candidate.split))


def test_even_exchange_is_the_exchange_of_even_arrays():
    import numpy as np

    for ranks, place in [(2, 1), (8, 8), (16, 8), (64, 4)]:
        for profile in (DEFAULTS["h100"], replace(DEFAULTS["h100"], shared_nic=True)):
            for two in (False, True):
                each = 1e8 / ranks
                inside = np.full(ranks, each * (place - 1))
                between = np.full(ranks, each * (ranks - place))
                group = Grouping(ranks, place)
                assert even_exchange_s(profile, group, 1e8, 1.0, two) == pytest.approx(
                    float(exchange_s(profile, group, inside, between, two))
                )


def test_times_follow_their_causes():
    model = StepModel(SMALL, cluster_for("a100", 16), "bf16", overlap=False)
    one, more = model.step(plan(ep=8, micro=4)), model.step(plan(ep=8, micro=4, number=4))
    assert more.total_s - more.reduce_s - more.optimizer_s == pytest.approx(
        4 * (one.total_s - one.reduce_s - one.optimizer_s)
    )
    assert model.step(plan(ep=1)).exchange_s == 0.0 < one.exchange_s
    assert model.step(plan(tp=2, ep=8)).tensor_s > 0.0 == one.tensor_s
    assert one.bubble_s == one.transfer_s == one.recompute_s == 0.0
    piped = model.step(plan(pp=4, number=4))
    assert piped.bubble_s == pytest.approx(
        3 / 4 * (piped.total_s - piped.bubble_s - piped.reduce_s - piped.optimizer_s)
    )
    again = model.step(plan(ep=8, micro=4, again=True))
    assert 0.2 < again.recompute_s / (one.dense_s + one.experts_s + one.exchange_s) < 0.6
    skewed = StepModel(SMALL, cluster_for("a100", 16), "bf16", imbalance=3.0, overlap=False).step(plan(ep=8, micro=4))
    assert skewed.experts_s > one.experts_s and skewed.exchange_s > one.exchange_s
    assert skewed.dense_s == one.dense_s
    hidden = StepModel(SMALL, cluster_for("a100", 16), "bf16").step(plan(ep=8, micro=64))
    plain = model.step(plan(ep=8, micro=64))
    assert hidden.exchange_s <= plain.exchange_s


def test_one_rank_runs_at_the_rate_of_large_products():
    """No communication and no small products: the time is the model's FLOPs over the rate."""
    free = replace(DEFAULTS["h100"], memory_bytes_per_s=1e18, launch_s=0.0, half_rows=0.0)
    model = StepModel(SMALL, replace(cluster_for("h100", 1), profile=free), "bf16", overlap=False)
    candidate = plan(1, micro=8)
    flops = 3 * SMALL.token_flops() * 8 * 256
    assert model.step(candidate).total_s == pytest.approx(flops / free.rate("bf16"), rel=0.01)
    assert model.utilization(candidate, flops / free.rate("bf16")) == pytest.approx(1.0)


def test_every_candidate_is_a_layout_that_divides():
    seen = 0
    for candidate in candidates(SMALL, 24, 48):
        layout = Layout(24, candidate.pp, candidate.tp, candidate.ep, candidate.etp)
        assert (layout.dp, layout.edp) == (candidate.dp, candidate.edp)
        assert candidate.dp * candidate.micro_batch * candidate.micro_batches == 48
        assert 16 % candidate.ep == 0 and sum(candidate.split) == 8
        seen += 1
    assert seen > 100
    assert {c.tp for c in candidates(SMALL, 24, 48, fixed={"tp": 2})} == {2}


def test_the_best_is_the_best_of_all():
    cluster = cluster_for("a100", 16)
    model = StepModel(SMALL, cluster, "bf16")
    found = search(model, 64)
    every = [
        model.step(c).total_s for c in candidates(SMALL, 16, 64) if fullest(model, c)[0].total <= cluster.usable_bytes
    ]
    assert found.fitting == len(every)
    assert [p.time.total_s for p in found.proposals] == sorted(every)[:5]
    assert len(found.reasons) == 6
    assert not any("-" in reason for reason in found.reasons), "nothing that fits is faster than the best"


def test_what_does_not_fit_is_told():
    small = cluster_for("a100", 8)
    with pytest.raises(ConfigError, match="nothing fits: the smallest layout of 8 ranks"):
        search(StepModel(LARGE, small, "bf16"), 8)
    with pytest.raises(ConfigError, match="no layout of 16 ranks divides"):
        search(StepModel(SMALL, cluster_for("a100", 16), "bf16"), 3, fixed={"tp": 1, "pp": 1})


@pytest.mark.slow  # tests/cli/test_plan.py has it as a command
def test_a_giant_model_on_96000_ranks_in_less_than_a_minute():
    assert LARGE.parameters > 1.75e12
    started = time.process_time()
    cluster = cluster_for("h100", 96_000)
    found = search(StepModel(LARGE, cluster, "bf16"), 48_000)
    assert time.process_time() - started < 60
    best = found.proposals[0]
    assert best.memory.total <= cluster.usable_bytes
    assert best.plan.pp * best.plan.tp * best.plan.dp == 96_000
    held = [stage_holding(LARGE, best.plan, stage) for stage in range(best.plan.pp)]
    experts = sum(h.experts for h in held) * best.plan.ep * best.plan.etp
    assert experts == sum(layer.num_experts * layer.expert for layer in LARGE.layers)
    assert 0.1 < best.utilization < 0.6
