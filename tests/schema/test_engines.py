"""What an engine refuses, and DeepSpeed's configuration merged with the recipe."""

from __future__ import annotations

import json

import pytest

from moeflow.config import compose
from moeflow.errors import ConfigError
from moeflow.schema.engines import deepspeed_config, engine_problems, read_ds_config, zero_stage

BASE = ["+recipe=gpt_moe", "data.batch_size=12", "launch.processes=2"]
ZERO = [*BASE, "parallel.engine=deepspeed"]


def composed(tmp_path, given, *words, base=ZERO):
    path = tmp_path / "ds config.json"
    path.write_text(json.dumps(given))
    return compose([*base, f"parallel.ds_config='{path}'", *words])


def refused(tmp_path, given, *words):
    with pytest.raises(ConfigError) as error:
        composed(tmp_path, given, *words)
    return str(error.value)


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp"])
@pytest.mark.parametrize(
    "key", ["parallel.pp=2", "parallel.tp=2", "parallel.etp=2", "parallel.expert_dp_comm=world", "precision=fp16"]
)
def test_layouts_that_an_engine_cannot_do(engine, key):
    with pytest.raises(ConfigError) as error:
        compose([*BASE, f"parallel.engine={engine}", key])
    message = str(error.value)
    assert f"parallel.engine={engine}" in message and "parallel.engine=ddp" in message
    assert key.split("=")[0].split(".")[-1] in message
    assert compose([*BASE, key]).parallel.engine == "ddp"


@pytest.mark.parametrize(
    ("given", "key", "theirs", "ours", "mend"),
    [
        ({"train_batch_size": 64}, "train_batch_size", "64", "data.batch_size=12", "data.batch_size=64"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu", "4", "12 / (2 * 1)", "=8"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps", "2", "trainer.grad_accum=1", "accum=2"),
        ({"gradient_clipping": 0.25}, "gradient_clipping", "0.25", "optim.clip_norm=1.0", "optim.clip_norm=0.25"),
        ({"gradient_clipping": 0}, "gradient_clipping", "0", "optim.clip_norm=1.0", "optim.clip_norm=null"),
        ({"optimizer": {"params": {"lr": 0.5}}}, "optimizer.params.lr", "0.5", "optim.lr=0.001", "optim.lr=0.5"),
        ({"optimizer": {"params": {"betas": [0.9, 0.95]}}}, "betas", "[0.9, 0.95]", "[0.9,0.99]", "[0.9,0.95]"),
        ({"optimizer": {"type": "SGD"}}, "optimizer.type", '"SGD"', "optim.name=adamw", "optim=sgd"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", '"Lamb"', "optim.name=adamw", "out of the file"),
        ({"bf16": {"enabled": True}}, "bf16.enabled", "true", "precision.dtype=fp32", "precision=bf16"),
        ({"fp16": {"enabled": True}}, "fp16.enabled", "true", "precision.dtype=fp32", "precision=fp16"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_conflict_is_named_with_both_values_and_the_mend(tmp_path, given, key, theirs, ours, mend):
    message = refused(tmp_path, given)
    assert key in message and f"={theirs}" in message and ours in message
    assert mend in message.partition("mend:")[2] and "out of the file" in message


def test_all_conflicts_are_told_at_once(tmp_path):
    message = refused(tmp_path, {"train_batch_size": 64, "gradient_clipping": 3, "scheduler": {"type": "WarmupLR"}})
    assert "3 problems" in message
    assert all(key in message for key in ("train_batch_size", "gradient_clipping", "scheduler"))


@pytest.mark.parametrize(
    "given",
    [
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"reduce_scatter": False}},
        {"zero_optimization": {"contiguous_gradients": False}},
        {"torch_autocast": {"enabled": True}},
        {"tensor_parallel": {"autotp_size": 2}},
        {"sequence_parallel_size": 2},
    ],
    ids=str,
)
def test_what_is_not_taken_says_why(tmp_path, given):
    assert "take" in refused(tmp_path, given).partition("mend:")[2]


@pytest.mark.parametrize("words", [["parallel.zero_stage=3"], None], ids=["recipe", "file"])
def test_zero_3_is_refused(tmp_path, words):
    if words:
        with pytest.raises(ConfigError, match=r"ZeRO-3.*keeps whole"):
            compose([*ZERO, *words])
    else:
        assert "ZeRO-3" in refused(tmp_path, {"zero_optimization": {"stage": 3}})


def test_stages_that_differ(tmp_path):
    message = refused(tmp_path, {"zero_optimization": {"stage": 1}}, "parallel.zero_stage=2")
    assert "zero_optimization.stage=1" in message and "parallel.zero_stage=2" in message


def test_keys_of_another_engine():
    with pytest.raises(ConfigError, match=r"parallel\.zero_stage is for DeepSpeed"):
        compose([*BASE, "parallel.zero_stage=1"])


@pytest.mark.parametrize(
    ("text", "said"), [(None, "cannot be read"), ("{", "not valid JSON"), ("[1]", "no table of keys")]
)
def test_files_that_are_none(tmp_path, text, said):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        compose([*ZERO, f"parallel.ds_config={path}"])


def test_an_agreeing_file_is_merged(tmp_path):
    given = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 4096, "offload_optimizer": {"device": "none"}},
        "comms_logger": {"enabled": True},
    }
    config = composed(tmp_path, given)
    assert zero_stage(config) == 2
    merged = deepspeed_config(config, 2, 1_000_001)
    assert merged["train_micro_batch_size_per_gpu"] == 6 and merged["gradient_accumulation_steps"] == 1
    # moeflow clips; a clip here would be a second one.
    assert merged["gradient_clipping"] == 0.0 and "optimizer" not in merged
    zero = merged["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (2, 4096, 1_000_002)
    assert merged["comms_logger"] == {"enabled": True}
    assert merged["data_types"] == {"grad_accum_dtype": "fp32"} and merged["bf16"] == {"enabled": False}


def test_without_a_file_zero_1():
    config = compose([*ZERO, "precision=bf16"])
    merged = deepspeed_config(config, 2, 100)
    assert merged["zero_optimization"]["stage"] == zero_stage(config) == 1
    assert merged["bf16"] == {"enabled": True} and merged["communication_data_type"] == "fp32"
    config.parallel.zero_stage = 0
    assert deepspeed_config(config, 2, 100)["bf16"] == {"enabled": False}


def test_the_frozen_configuration_holds_the_text(tmp_path):
    from moeflow.config.paths import absolute_paths

    config = composed(tmp_path, {"train_batch_size": 12})
    frozen = absolute_paths(config)
    (tmp_path / "ds config.json").unlink()
    assert read_ds_config(frozen.parallel.ds_config) == {"train_batch_size": 12}
    assert absolute_paths(frozen).parallel.ds_config == frozen.parallel.ds_config
    assert list(engine_problems(frozen, 2)) == []


@pytest.mark.parametrize(
    ("engine", "ep", "key"), [("deepspeed", 2, "placement"), ("fsdp", 2, "placement"), ("fsdp", 2, "shadow")]
)
def test_balance_that_an_engine_cannot_do(engine, ep, key):
    words = [*BASE, "launch.processes=4", f"parallel.ep={ep}", f"balance.{key}=true"]
    with pytest.raises(ConfigError, match=f"cannot do balance.{key}=true"):
        compose([*words, f"parallel.engine={engine}"])
    compose(words)


def test_experts_that_fsdp_leaves_whole_may_be_taken_apart():
    words = [*BASE, "parallel.ep=2", "parallel.engine=fsdp", "overlap.chunks=2"]
    compose([*words, "balance.shadow=true"])
    with pytest.raises(ConfigError, match=r"cannot do overlap\.chunks=2 here: each expert is cut over edp=2 ranks"):
        compose([*words, "launch.processes=4"])
