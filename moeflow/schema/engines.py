"""What the engines can do, and DeepSpeed's configuration merged with the recipe.  No torch, no DeepSpeed.

The recipe is the one source of batch sizes, learning rate, precision and clipping.  A DeepSpeed file may state them as
well, as long as it states the same.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeflow.errors import ConfigError

if TYPE_CHECKING:
    from moeflow.schema.run import RunConfig

#: (what, mend)
Found = tuple[str, str]

_REASONS = {
    "deepspeed": "ZeRO reduces gradients inside the backward pass, over dp and edp alone",
    "fsdp": "FSDP cuts parameters over dp and edp alone",
}
# Keys of DeepSpeed that change what is trained behind moeflow's back, or that the engine's own clipping cannot see.
_REFUSED = {
    "zero_optimization.offload_optimizer": "optimizer offload takes the gradients away before they are clipped",
    "zero_optimization.offload_param": "parameter offload needs ZeRO-3",
    "zero_optimization.cpu_offload": "optimizer offload takes the gradients away before they are clipped",
    "zero_optimization.zenflow": "ZenFlow steps part of the parameters late",
    "zero_optimization.zero_quantized_gradients": "gradients have to be exact",
    "scheduler": "the recipe's schedule sets the learning rate (schedule=..., schedule.warmup_steps)",
    "torch_autocast": "precision=bf16 sets up autocast",
    "amp": "precision=bf16 sets the number format",
    "tensor_parallel": "moeflow cuts tensors itself (parallel.tp, with parallel.engine=ddp)",
    "pipeline": "moeflow cuts the model itself (parallel.pp, with parallel.engine=ddp)",
    "expert_parallel": "moeflow spreads experts itself (parallel.ep)",
    "sequence_parallel_size": "moeflow cuts sequences itself (parallel.sequence_parallel, with parallel.engine=ddp)",
    "hybrid_engine": "it is for generation inside training",
    "curriculum_learning": "the recipe decides the samples",
    "data_efficiency": "the recipe decides the samples",
    "progressive_layer_drop": "the recipe decides the model",
    "compression_training": "the recipe decides the model",
    "sparse_gradients": "gradients have to be dense",
}
_OPTIMIZERS = {"adamw": ("adamw", "adam", "fusedadam"), "sgd": ("sgd",)}


def read_ds_config(given: str) -> dict[str, Any]:
    """DeepSpeed's configuration from a file's name, or from the JSON text itself.

    Raises:
        ConfigError: there is no such file, or it is no JSON object.
    """
    text, where = given, "parallel.ds_config"
    if not given.lstrip().startswith("{"):
        where = f"parallel.ds_config={given}"
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}", "name DeepSpeed's JSON file") from error
    try:
        read = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}", "correct the file at that place") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{where} holds no table of keys", "write it as DeepSpeed's documentation shows")
    return read


def zero_stage(config: RunConfig) -> int:
    """ZeRO's stage: that of the recipe, of the DeepSpeed file, or 1."""
    if config.parallel.zero_stage is not None:
        return config.parallel.zero_stage
    given = read_ds_config(config.parallel.ds_config) if config.parallel.ds_config else {}
    return _number(_at(given, "zero_optimization.stage"), 1)


def describe_engine(config: RunConfig) -> str:
    """The engine, and what it cuts, in a few words."""
    if config.parallel.engine == "fsdp":
        return "fsdp: parameters, gradients and optimizer state cut over dp, those of experts over edp"
    if config.parallel.engine == "ddp":
        return "ddp: whole parameters, gradients and optimizer state on each rank"
    cut = ("nothing", "optimizer state", "gradients and optimizer state")
    stage = zero_stage(config)
    return f"deepspeed, ZeRO-{stage}: {cut[stage]} cut{' over dp, those of experts over edp' if stage else ''}"


def engine_problems(config: RunConfig, dp: int | None) -> Iterator[Found]:
    """What the engine of a configuration cannot do: (what is wrong, what mends it).

    Args:
        config: the whole configuration; its layout divides.
        dp: data-parallel size, where it is known.
    """
    parallel = config.parallel
    if parallel.engine != "deepspeed":
        for key, default in (("zero_stage", None), ("ds_config", None)):
            if getattr(parallel, key) != default:
                yield (
                    f"parallel.{key} is for DeepSpeed, and parallel.engine={parallel.engine}.",
                    (f"parallel.engine=deepspeed, or parallel.{key}=null"),
                )
    if parallel.engine == "ddp":
        return
    reason = _REASONS[parallel.engine]
    for key in ("pp", "tp", "etp"):
        if getattr(parallel, key) > 1:
            yield (
                f"parallel.engine={parallel.engine} cannot do parallel.{key}={getattr(parallel, key)}: {reason}.",
                (f"parallel.engine=ddp, or parallel.{key}=1"),
            )
    if parallel.expert_dp_comm != "dp":
        yield (
            f"parallel.engine={parallel.engine} cannot do parallel.expert_dp_comm={parallel.expert_dp_comm}: {reason}.",
            "parallel.engine=ddp, or parallel.expert_dp_comm=dp",
        )
    if config.balance.placement:
        yield (
            f"parallel.engine={parallel.engine} cannot do balance.placement=true: an expert that moves takes its "
            "optimizer state along, which this engine has cut.",
            "parallel.engine=ddp, or balance.placement=false",
        )
    if parallel.engine == "fsdp" and dp is not None and dp > parallel.ep:
        yield from _whole_experts_needed(config, dp)
    if config.precision.dtype == "fp16":
        yield (
            f"parallel.engine={parallel.engine} has no loss scaling that leaves a step out on all ranks alike, and "
            "precision=fp16 needs one.",
            "precision=bf16, or parallel.engine=ddp",
        )
    if parallel.engine == "deepspeed":
        yield from _deepspeed_problems(config, dp)


def _whole_experts_needed(config: RunConfig, dp: int) -> Iterator[Found]:
    """What takes experts apart, and so cannot be where FSDP has cut them."""
    chunks = config.overlap.chunks
    wants = [
        ("balance.shadow", config.balance.shadow, "true", "false"),
        ("overlap.chunks", chunks != "1", chunks, "1"),
    ]
    for key, wanted, value, without in wants:
        if wanted:
            yield (
                f"parallel.engine=fsdp cannot do {key}={value} here: each expert is cut over edp="
                f"{dp // config.parallel.ep} ranks, and it needs whole ones.",
                f"parallel.ep={dp}, parallel.engine=ddp, or {key}={without}",
            )


def _deepspeed_problems(config: RunConfig, dp: int | None) -> Iterator[Found]:
    try:
        given = read_ds_config(config.parallel.ds_config) if config.parallel.ds_config else {}
    except ConfigError as error:
        yield error.what, error.mend or ""
        return
    stage = config.parallel.zero_stage
    if (_number(_at(given, "zero_optimization.stage"), 1) if stage is None else stage) == 3:
        yield (
            "ZeRO-3 (parallel.zero_stage, zero_optimization.stage) cuts the parameters themselves, which this engine "
            "keeps whole for the experts' grouped matrix products.",
            "parallel.engine=fsdp cuts parameters too; or parallel.zero_stage=2",
        )
    for key, theirs, ours, mend in _conflicts(config, given, dp):
        yield (
            f"parallel.ds_config says {key}={json.dumps(theirs)}, and the recipe says {ours}.",
            f"{mend}, or take {key} out of the file" if mend else f"take {key} out of the file",
        )
    for key, why in _REFUSED.items():
        value = _at(given, key)
        if value not in (None, False, 1, {}) and not _is_off(value):
            yield f"parallel.ds_config sets {key}, which moeflow does not take: {why}.", f"take {key} out of the file"
    for key in ("reduce_scatter", "contiguous_gradients"):
        if _at(given, f"zero_optimization.{key}") is False:
            yield (
                f"parallel.ds_config says zero_optimization.{key}=false, with which DeepSpeed reduces no experts.",
                f"take zero_optimization.{key} out of the file",
            )


def _is_off(value: Any) -> bool:
    return isinstance(value, dict) and (
        value.get("enabled") is False or value.get("device") == "none" or value.get("autotp_size") in (0, 1)
    )


def _conflicts(config: RunConfig, given: dict[str, Any], dp: int | None) -> Iterator[tuple[str, Any, str, str]]:
    """(DeepSpeed's key, its value, the recipe's key and value, override that would agree) where the two differ."""
    optim, accumulated = config.optim, config.trainer.grad_accum
    wanted: list[tuple[str, str, Any]] = [
        ("train_batch_size", "data.batch_size", config.data.batch_size),
        ("gradient_accumulation_steps", "trainer.grad_accum", accumulated),
        ("optimizer.params.lr", "optim.lr", optim.lr),
        ("optimizer.params.weight_decay", "optim.weight_decay", optim.weight_decay),
        ("zero_optimization.stage", "parallel.zero_stage", config.parallel.zero_stage),
    ]
    own = ("betas", "eps") if optim.name == "adamw" else ("momentum", "nesterov")
    wanted += [(f"optimizer.params.{key}", f"optim.{key}", getattr(optim, key)) for key in own]
    for key, name, ours in wanted:
        theirs = _at(given, key)
        if theirs not in (None, "auto") and ours is not None and not _equal(theirs, ours):
            yield key, theirs, f"{name}={_as_override(ours)}", f"{name}={_as_override(theirs)}"
    clip = _at(given, "gradient_clipping")
    if clip not in (None, "auto") and not _equal(clip, optim.clip_norm or 0.0):
        ours = "null" if optim.clip_norm is None else optim.clip_norm
        yield "gradient_clipping", clip, f"optim.clip_norm={ours}", f"optim.clip_norm={clip or 'null'}"
    kind = _at(given, "optimizer.type")
    if kind is not None and str(kind).lower() not in _OPTIMIZERS[optim.name]:
        other = next((name for name, kinds in _OPTIMIZERS.items() if str(kind).lower() in kinds), None)
        yield "optimizer.type", kind, f"optim.name={optim.name}", f"optim={other}" if other else ""
    if optim.name == "adamw" and _at(given, "optimizer.params.adam_w_mode") is False:
        yield "optimizer.params.adam_w_mode", False, "optim.name=adamw", ""
    for key, means in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        enabled, dtype = _at(given, f"{key}.enabled"), config.precision.dtype
        if isinstance(enabled, bool) and enabled != (dtype == means):
            yield f"{key}.enabled", enabled, f"precision.dtype={dtype}", f"precision={means if enabled else 'fp32'}"
    micro = _at(given, "train_micro_batch_size_per_gpu")
    if dp is not None and isinstance(micro, int) and micro * dp * accumulated != config.data.batch_size:
        ours = f"data.batch_size / (dp * trainer.grad_accum) = {config.data.batch_size} / ({dp} * {accumulated})"
        yield "train_micro_batch_size_per_gpu", micro, ours, f"data.batch_size={micro * dp * accumulated}"
    kept = _at(given, "data_types.grad_accum_dtype")
    if kept not in (None, "fp32"):
        yield "data_types.grad_accum_dtype", kept, "that gradients are accumulated in fp32", ""


def deepspeed_config(config: RunConfig, dp: int, parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a run: the user's, and what the recipe decides.

    Args:
        config: the whole configuration, checked by `engine_problems`.
        dp: data-parallel size.
        parameters: numbers of this rank's model.
    """
    given = copy.deepcopy(read_ds_config(config.parallel.ds_config)) if config.parallel.ds_config else {}
    stage = zero_stage(config)
    for key in ("optimizer", "scheduler", "amp", "fp16", "bfloat16", "torch_autocast"):
        given.pop(key, None)
    zero = given.setdefault("zero_optimization", {})
    accumulated = config.trainer.grad_accum
    # DeepSpeed allocates whole buckets, and by default more than most models have numbers.
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if zero.get(key) in (None, "auto"):
            zero[key] = min(500_000_000, parameters + parameters % 2)
    zero["stage"] = stage
    zero.pop("compute_grad_norm", None)
    if stage:
        zero["compute_grad_norm"] = False
    # Stage 0 keeps fp32 parameters under autocast, as the plain engine does.
    bf16 = config.precision.dtype == "bf16" and stage > 0
    given.update(
        train_batch_size=config.data.batch_size,
        train_micro_batch_size_per_gpu=config.data.batch_size // (dp * accumulated),
        gradient_accumulation_steps=accumulated,
        gradient_clipping=0.0,  # the engine clips; DeepSpeed's default is 1.0
        bf16={"enabled": bf16},
        zero_allow_untested_optimizer=True,
    )
    given.setdefault("data_types", {})["grad_accum_dtype"] = "fp32"
    # DeepSpeed adds bf16 gradients up in bf16 by default; the other engines do it in fp32.
    given.setdefault("communication_data_type", "fp32")
    given.setdefault("steps_per_print", None)
    return given


def _at(table: dict[str, Any], key: str) -> Any:
    value: Any = table
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _equal(theirs: Any, ours: Any) -> bool:
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_equal, theirs, ours))
    if isinstance(ours, (int, float)) and isinstance(theirs, (int, float)):
        return abs(theirs - ours) <= 1e-12 * max(abs(theirs), abs(ours))
    return bool(theirs == ours)


def _as_override(value: Any) -> str:
    return json.dumps(value).replace(" ", "").strip('"')
