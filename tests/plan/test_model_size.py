"""Counts against models that are built, and against what parallel.inventory finds on each rank."""

from __future__ import annotations

import pytest
import torch

from moeflow.errors import ConfigError
from moeflow.models import build_model
from moeflow.models.flops import count_parameters, forward_flops
from moeflow.parallel.inventory import take_stock
from moeflow.plan.layouts import Candidate, stage_split
from moeflow.plan.memory import stage_holding
from moeflow.plan.model_size import gpt_size
from moeflow.schema import GATES, GPTConfig, ParallelConfig
from moeflow.schema.layout import Layout

MODELS = {
    "plain": {},
    "dense": {"num_experts": 0},
    "untied": {"tie_embeddings": False, "num_kv_heads": 2, "head_dim": 24},
    "every other": {"moe_every": 2, "moe_offset": 1, "d_hidden": 160},
    "deepseek": {
        "attention": "mla", "mla_q_rank": 24, "mla_kv_rank": 16, "first_dense": 1, "shared_hidden": 32,
        "expert_hidden": 24, "tie_embeddings": False,
    },
    "mla, direct queries": {"attention": "mla"},
    "qwen": {"qkv_bias": True, "qk_norm": "head", "shared_hidden": 48, "shared_gate": True},
    "olmoe": {"qk_norm": "all"},
}  # fmt: skip


def config(name):
    return GPTConfig(**{"vocab_size": 97, "num_layers": 4, "d_model": 64, "num_heads": 4, **MODELS[name]})


def built(model, gate):
    with torch.device("meta"):
        return build_model(model, gate)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_built_model(name):
    gate = GATES["naive"]()
    size = gpt_size(config(name), gate, 32)
    assert (size.parameters, size.active) == count_parameters(built(config(name), gate))


@pytest.mark.parametrize("gate", [g for g in GATES if g not in ("expert_choice", "soft")])
def test_parameters_of_every_gate(gate):
    options = GATES[gate](top_k=1) if gate in ("switch", "hash") else GATES[gate]()
    size = gpt_size(config("plain"), options, 32)
    assert size.parameters == count_parameters(built(config("plain"), options))[0]


@pytest.mark.parametrize("name", ["plain", "dense", "untied", "every other"])
def test_flops_are_those_of_the_counter(name):
    gate, seq = GATES["naive"](), 64
    size = gpt_size(config(name), gate, seq)
    counted = forward_flops(built(config(name), gate), torch.zeros(1, seq, dtype=torch.int64)) / seq
    # The counter takes attention over the whole sequence; causal attention needs half.
    scores = sum(layer.score_width for layer in size.layers) * seq
    assert size.token_flops() + scores == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("name", ["plain", "dense", "untied", "every other", "deepseek", "qwen"])
@pytest.mark.parametrize(
    ("pp", "tp", "ep", "etp"), [(1, 1, 4, 1), (2, 2, 2, 2), (4, 1, 2, 1), (1, 2, 1, 2), (2, 1, 4, 2)]
)
def test_each_rank_holds_what_the_inventory_finds(name, pp, tp, ep, etp):
    gate, model = GATES["naive"](), config(name)
    if model.num_experts == 0:
        ep = etp = 1
    size = gpt_size(model, gate, 32)
    plan = Candidate(16, pp, tp, ep, etp, 1, 4, stage_split(size.costs, size.head_cost, pp))
    holdings = take_stock(built(model, gate), Layout(16, pp, tp, ep, etp), ParallelConfig(pp=pp, tp=tp, ep=ep, etp=etp))
    for held in holdings:
        mine = stage_holding(size, plan, held.pp_rank)
        assert mine.experts == held.experts
        assert tuple(map(str, mine.layers)) == held.layers or pp == 1
        if held.tp_rank == 0:  # which has the larger part of an uneven vocabulary
            assert mine.dense == held.dense


def test_a_vocabulary_must_be_known():
    with pytest.raises(ConfigError, match="vocab_size=null"):
        gpt_size(GPTConfig(), GATES["naive"](), 32)
