"""DeepSpeed's engine where its library has ways of its own: frozen parameters, a process alone, files it refuses."""

from __future__ import annotations

import os

import pytest
import torch

from moeflow.errors import ConfigError
from moeflow.parallel.engines import make_engine
from moeflow.parallel.prepare import leave
from moeflow.schema import PrecisionConfig
from moeflow.train.optim import build_optimizer
from moeflow.train.session import join, open_session
from tests.distributed import LAUNCHER_VARIABLES, run_ranks
from tests.parallel.gpt_run import config_of, train

pytest.importorskip("deepspeed", reason='DeepSpeed is not installed: pip install "moeflow[deepspeed]"')
GATE = "model/blocks.0.mlp.gate.proj.weight"


def frozen_gate(parallel):
    """The gate in a checkpoint; then, after other values were loaded, in the checkpoint and in the model."""
    config = config_of(parallel, gate={"frozen": True}, precision=PrecisionConfig("bf16"))
    accelerator, topology = join(config)
    session = open_session(config, accelerator, topology)
    engine = make_engine(
        config, accelerator, topology, session.part, lambda model, split: build_optimizer(model, config.optim, split)
    )
    first = engine.tensors()[GATE].clone()
    engine.load(lambda tensors: tensors[GATE].mul_(3.0), optimizer=False)
    used = session.model.get_parameter(GATE.removeprefix("model/"))
    result = first, engine.tensors()[GATE].clone(), used.detach().clone()
    leave()
    return result


@pytest.mark.distributed
def test_a_frozen_gate_stays_fp32_in_checkpoints():
    plain, _, _ = run_ranks(frozen_gate, 2, {"ep": 2}, timeout=60, init=False)[0]
    zero = {"ep": 2, "engine": "deepspeed", "zero_stage": 2}
    for first, after, used in run_ranks(frozen_gate, 2, zero, timeout=120, init=False):
        assert first.dtype == torch.float32 and first.equal(plain)
        assert after.equal(3.0 * plain)
        assert used.dtype == torch.bfloat16 and used.equal((3.0 * plain).bfloat16())


def alone(parallel):
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    losses, _, _ = train(parallel, steps=2)
    return losses, "LOCAL_RANK" in os.environ


@pytest.mark.distributed
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_process_that_nobody_launched(stage):
    wanted, _ = run_ranks(alone, 1, {}, timeout=60, init=False)[0]
    losses, left = run_ranks(alone, 1, {"engine": "deepspeed", "zero_stage": stage}, timeout=120, init=False)[0]
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert not left


def refused(text):
    try:
        train({"engine": "deepspeed", "ds_config": text}, steps=1)
    except ConfigError as error:
        return error.what
    return None


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"zero_optimization": {"stag": 2}}', "stag: Extra inputs are not permitted"),
        ('{"elasticity": {"enabled": true}}', "Elastic training has been removed"),
    ],
)
def test_what_deepspeed_refuses_names_the_key(text, said):
    told = run_ranks(refused, 1, text, timeout=120, init=False)[0]
    assert told is not None and told.startswith("DeepSpeed refuses parallel.ds_config:") and said in told
