"""Runs on DeepSpeed and FSDP2 from end to end: resuming to the bit, another engine, the command line."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from moeflow.errors import ConfigError
from moeflow.schema import CheckpointConfig, RunConfig
from moeflow.train.metrics import read_rows
from tests.distributed import run_ranks
from tests.parallel.gpt_run import config_of
from tests.train.runs import moeflow
from tests.train.test_runs import saved_tensors

ZERO = {"engine": "deepspeed", "ep": 2}


def run(config: RunConfig, folder: str, resume: bool) -> dict:
    from moeflow.train.job import train

    return train(config, folder, resume)


def train(folder, world, parallel, stop_at, resume=False, **more):
    config = config_of(parallel, checkpoint=CheckpointConfig(every=0), **more)
    trainer = dataclasses.replace(config.trainer, max_steps=9, stop_at=stop_at, log_every=1, eval_every=2)
    trainer.eval_batches = 1
    folder.mkdir(exist_ok=True)
    arguments = (dataclasses.replace(config, trainer=trainer), str(folder), resume)
    return run_ranks(run, world, *arguments, timeout=120, init=False)[0]


def losses_of(folder):
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {**ZERO, "zero_stage": 2}),
        pytest.param(2, {"engine": "fsdp", "ep": 2}, marks=pytest.mark.slow),
        pytest.param(2, {**ZERO, "zero_stage": 0}, marks=pytest.mark.slow),
        pytest.param(4, {**ZERO, "zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param(4, {"engine": "fsdp", "ep": 2}, marks=pytest.mark.slow),
        pytest.param(1, {"engine": "deepspeed"}, marks=pytest.mark.slow),
        pytest.param(1, {"engine": "fsdp"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_in_parts_is_the_run_in_one_go(tmp_path, world, parallel):
    train(tmp_path / "whole", world, parallel, 6)
    train(tmp_path / "parts", world, parallel, 3)
    train(tmp_path / "parts", world, parallel, 6, resume=True)
    whole, parts = (saved_tensors(tmp_path / name, 6) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and any(key.endswith("/exp_avg") for key in whole)
    assert all(value.equal(parts[key]) for key, value in whole.items())
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_from_engine_to_engine(tmp_path, precision):
    """ddp -> ZeRO-2 -> FSDP2 -> ZeRO-1 -> ZeRO-0 -> ddp, a step each, as one run."""
    from moeflow.schema import PrecisionConfig

    chain = [{"ep": 2}, {**ZERO, "zero_stage": 2}, {"engine": "fsdp", "ep": 2}, {**ZERO, "zero_stage": 1}]
    chain += [{**ZERO, "zero_stage": 0}, {"ep": 2}]
    more = {"precision": PrecisionConfig(precision)}
    train(tmp_path / "plain", 2, {"ep": 2}, len(chain), **more)
    for step, parallel in enumerate(chain):
        train(tmp_path / "chain", 2, parallel, step + 1, resume=step > 0, **more)
    found, wanted = losses_of(tmp_path / "chain"), losses_of(tmp_path / "plain")
    assert len(found) == len(chain)
    assert found == pytest.approx(wanted, rel=1e-5 if precision == "fp32" else 5e-3)
    plain, chained = (saved_tensors(tmp_path / name, len(chain)) for name in ("plain", "chain"))
    assert {k: (v.shape, v.dtype) for k, v in plain.items()} == {k: (v.shape, v.dtype) for k, v in chained.items()}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("words", [["parallel.engine=deepspeed", "parallel.zero_stage=2"], ["parallel.engine=fsdp"]])
@pytest.mark.parametrize("recipe", ["gpt_moe", "cifar_moe"])
def test_the_command_line(tmp_path, recipe, words):
    run_dir = tmp_path / "run"
    tiny = ["data.source=synthetic", "data.batch_size=8", "trainer.max_steps=4", "trainer.eval_batches=1"]
    tiny += ["trainer.log_every=1", "launch.device=cpu", "launch.processes=2", "parallel.ep=2", "precision=bf16"]
    if recipe == "gpt_moe":
        tiny += ["model.d_model=32", "model.num_layers=2", "model.num_heads=2"]
    moeflow("train", f"+recipe={recipe}", *tiny, *words, "trainer.stop_at=2", f"run.dir={run_dir}")
    other = "parallel.engine=fsdp" if "deepspeed" in words[0] else "parallel.engine=deepspeed"
    again = moeflow("resume", str(run_dir), "trainer.stop_at=null", other, "parallel.zero_stage=null")
    assert "step 4/4" in again.stdout + again.stderr
    assert "eval/loss" in moeflow("eval", str(run_dir)).stdout


def test_without_deepspeed_the_message_says_what_to_install(monkeypatch):
    import torch

    from moeflow.parallel.engines.deepspeed import import_deepspeed

    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"DeepSpeed cannot be imported.*\n.*moeflow\[deepspeed\]"):
        import_deepspeed(torch.device("cpu"))


def test_an_old_deepspeed_is_named(monkeypatch):
    import torch

    deepspeed = pytest.importorskip("deepspeed", reason='DeepSpeed is not installed: pip install "moeflow[deepspeed]"')
    from moeflow.parallel.engines.deepspeed import import_deepspeed

    monkeypatch.setattr(deepspeed, "__version__", "0.19.0")
    with pytest.raises(ConfigError, match=r"DeepSpeed 0\.19\.0 is too old: moeflow needs 0\.19\.8"):
        import_deepspeed(torch.device("cpu"))
