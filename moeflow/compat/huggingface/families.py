"""config.json of each family of models <-> options of the `gpt` model and its gate.

A family says which options it can express; whatever is left is refused by name, so that an exported model computes what
the trained one did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moeflow.errors import CheckpointError, did_you_mean
from moeflow.models.transformer import expert_width, hidden_width
from moeflow.schema.gate import AuxFreeGateConfig, GateConfig, NaiveGateConfig
from moeflow.schema.model import GPTConfig

# Gates whose choice in evaluation is the top-k of a softmax.
_SOFTMAX_GATES = ("naive", "switch", "gshard")
# Rotary positions have no largest one; Transformers wants a number.
_POSITIONS = 131072


@dataclass(frozen=True)
class Family:
    """One `model_type` of Transformers.

    Attributes:
        name: the `model_type`.
        architecture: class in Transformers.
        experts_key: of the number of experts; "" for a dense family.
        width_key: of the width of one expert.
        fixed: options of ours -> the one value that the family can express.
        options: to ours from config.json, beside what all families share.
        entries: from ours to config.json, likewise.
    """

    name: str
    architecture: str
    experts_key: str
    width_key: str
    fixed: dict[str, Any]
    options: Callable[[dict[str, Any]], dict[str, Any]]
    entries: Callable[[GPTConfig, GateConfig], dict[str, Any]]


def _sparse_step(source: dict[str, Any]) -> dict[str, Any]:
    """Which blocks have experts, as Qwen says it."""
    dense = source.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise CheckpointError(
            f"mlp_only_layers={dense}: only blocks at the start can be dense beside every n-th (model.first_dense)"
        )
    step = source.get("decoder_sparse_step", 1)
    return {"moe_every": step, "moe_offset": step - 1, "first_dense": len(dense)}


def _sparse_entries(model: GPTConfig) -> dict[str, Any]:
    return {"decoder_sparse_step": model.moe_every, "mlp_only_layers": list(range(model.first_dense))}


_NO_EXTRAS = {"attention": "gqa", "qkv_bias": False, "qk_norm": "none", "shared_hidden": 0}
_EVERY_BLOCK = {"moe_every": 1, "first_dense": 0}


def _qwen2(source: dict[str, Any]) -> dict[str, Any]:
    return {
        "qkv_bias": source.get("qkv_bias", True),
        "shared_hidden": source["shared_expert_intermediate_size"],
        "shared_gate": True,
        **_sparse_step(source),
    }


def _deepseek(source: dict[str, Any]) -> dict[str, Any]:
    if source.get("moe_layer_freq", 1) != 1:
        raise CheckpointError(f"moe_layer_freq={source['moe_layer_freq']}: only 1 is known")
    return {
        "attention": "mla",
        "mla_q_rank": source.get("q_lora_rank"),
        "mla_kv_rank": source["kv_lora_rank"],
        "mla_nope_dim": source["qk_nope_head_dim"],
        "mla_rope_dim": source["qk_rope_head_dim"],
        "mla_value_dim": source["v_head_dim"],
        "first_dense": source.get("first_k_dense_replace", 0),
        "shared_hidden": source["n_shared_experts"] * source["moe_intermediate_size"],
        "num_kv_heads": None,
        "head_dim": None,
    }


def _deepseek_entries(model: GPTConfig, gate: GateConfig) -> dict[str, Any]:
    return {
        "q_lora_rank": model.mla_q_rank,
        "kv_lora_rank": model.mla_kv_rank,
        "qk_nope_head_dim": model.mla_nope_dim,
        "qk_rope_head_dim": model.mla_rope_dim,
        "v_head_dim": model.mla_value_dim,
        "first_k_dense_replace": model.first_dense,
        "n_shared_experts": model.shared_hidden // expert_width(model, gate.top_k),
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": gate.scaling,
        "n_group": getattr(gate, "num_groups", 1),
        "topk_group": getattr(gate, "top_groups", 1),
    }


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", "", "", {**_NO_EXTRAS, "num_experts": 0}, lambda s: {}, lambda m, g: {}),
        Family(
            "mixtral", "MixtralForCausalLM", "num_local_experts", "intermediate_size", {**_NO_EXTRAS, **_EVERY_BLOCK},
            lambda s: {}, lambda m, g: {},
        ),
        Family(
            "olmoe", "OlmoeForCausalLM", "num_experts", "intermediate_size",
            {**_NO_EXTRAS, **_EVERY_BLOCK, "qk_norm": "all"}, lambda s: {"qk_norm": "all"}, lambda m, g: {},
        ),
        Family(
            "qwen2_moe", "Qwen2MoeForCausalLM", "num_experts", "moe_intermediate_size",
            {"attention": "gqa", "qk_norm": "none", "shared_gate": True}, _qwen2,
            lambda m, g: {
                **_sparse_entries(m), "qkv_bias": m.qkv_bias, "shared_expert_intermediate_size": m.shared_hidden
            },
        ),
        Family(
            "qwen3_moe", "Qwen3MoeForCausalLM", "num_experts", "moe_intermediate_size",
            {**_NO_EXTRAS, "qk_norm": "head"}, lambda s: {"qk_norm": "head", **_sparse_step(s)},
            lambda m, g: _sparse_entries(m),
        ),
        Family(
            "deepseek_v3", "DeepseekV3ForCausalLM", "n_routed_experts", "moe_intermediate_size",
            {"attention": "mla", "shared_gate": False, "moe_every": 1}, _deepseek, _deepseek_entries,
        ),
    )
}  # fmt: skip


# --- from Hugging Face -----------------------------------------------------------------------------------------------


def read_config(source: dict[str, Any]) -> tuple[Family, GPTConfig, GateConfig]:
    """Return the family, and the options that build the same model here.

    Args:
        source: content of config.json.

    Raises:
        CheckpointError: the family, or one of its options, is not known here.
    """
    name = source.get("model_type")
    if name not in FAMILIES:
        raise CheckpointError(
            f"model_type {name!r} is not known; known: {', '.join(FAMILIES)}.{did_you_mean(str(name), FAMILIES)}"
        )
    family = FAMILIES[name]
    try:
        _refuse_unknown(source)
        experts = source[family.experts_key] if family.experts_key in source else source.get("num_local_experts", 0)
        model = GPTConfig(
            vocab_size=source["vocab_size"],
            num_layers=source["num_hidden_layers"],
            d_model=source["hidden_size"],
            num_heads=source["num_attention_heads"],
            num_experts=experts if family.experts_key else 0,
            d_hidden=source["intermediate_size"],
            expert_hidden=source[family.width_key] if family.experts_key else None,
            tie_embeddings=source.get("tie_word_embeddings", False),
            rope_theta=float(_rope(source).get("rope_theta") or source.get("rope_theta") or 10000.0),
            norm_eps=source.get("rms_norm_eps", 1e-6),
        )
        more = {"num_kv_heads": source.get("num_key_value_heads"), "head_dim": source.get("head_dim")}
        model = dataclasses.replace(model, **{**more, **family.options(source)})
        gate = _read_gate(family, source) if family.experts_key else NaiveGateConfig(load_balance_scope="sequence")
    except KeyError as missing:
        raise CheckpointError(f"config.json of a {name} model has no entry {missing}") from None
    if model.head_dim is not None and model.head_dim * model.num_heads == model.d_model:
        model = dataclasses.replace(model, head_dim=None)
    return family, model, gate


def _read_gate(family: Family, source: dict[str, Any]) -> GateConfig:
    common: dict[str, Any] = {"top_k": source["num_experts_per_tok"], "load_balance_scope": "sequence"}
    if family.name == "deepseek_v3":
        return AuxFreeGateConfig(
            **common,
            renormalize="before" if source.get("norm_topk_prob", True) else "none",
            scaling=source.get("routed_scaling_factor", 1.0),
            num_groups=source.get("n_group") or 1,
            top_groups=source.get("topk_group") or 1,
        )
    always = family.name == "mixtral"
    return NaiveGateConfig(
        **common,
        renormalize="before" if always or source.get("norm_topk_prob", False) else "none",
        load_balance_coef=source.get("router_aux_loss_coef", 0.01),
    )


def _rope(source: dict[str, Any]) -> dict[str, Any]:
    return source.get("rope_parameters") or source.get("rope_scaling") or {}


def _refuse_unknown(source: dict[str, Any]) -> None:
    rope = _rope(source)
    kind = rope.get("rope_type", rope.get("type", "default"))
    window = source.get("sliding_window") if source.get("use_sliding_window", True) else None
    found = {
        "rope type": kind if kind != "default" else None,
        "sliding_window": window if window and window < source.get("max_position_embeddings", 0) else None,
        "attention_bias": source.get("attention_bias") or None,
        "mlp_bias": source.get("mlp_bias") or None,
        "clip_qkv": source.get("clip_qkv"),
        "hidden_act": source.get("hidden_act") if source.get("hidden_act", "silu") != "silu" else None,
        "quantization_config": "set" if source.get("quantization_config") else None,
    }
    listed = [f"{key}={value}" for key, value in found.items() if value is not None]
    if listed:
        raise CheckpointError(
            f"config.json asks for what the gpt model has not: {', '.join(listed)}",
            "a model without it; quantized weights have to be turned into bf16 or fp32 first",
        )


# --- to Hugging Face -------------------------------------------------------------------------------------------------


def choose_family(model: GPTConfig, gate: GateConfig, name: str | None = None) -> Family:
    """Return the family that computes what this model does.

    Args:
        model: of the run.
        gate: of the run.
        name: the family that the user wants; None takes the first that fits.

    Raises:
        CheckpointError: none fits; the message says what stands against it.
    """
    if name is not None and name not in FAMILIES:
        raise CheckpointError(f"family '{name}' is not one of {', '.join(FAMILIES)}.{did_you_mean(name, FAMILIES)}")
    wanted = [FAMILIES[name]] if name else list(FAMILIES.values())
    against = {family.name: _objections(family, model, gate) for family in wanted}
    for family in wanted:
        if not against[family.name]:
            return family
    lines = [f"{family}: {'; '.join(reasons)}" for family, reasons in against.items()]
    raise CheckpointError("the model cannot be told in Hugging Face's terms. " + ". ".join(lines))


def _objections(family: Family, model: GPTConfig, gate: GateConfig) -> list[str]:
    found = []
    if model.num_experts == 0:
        if family.experts_key:
            return ["it has experts, this model none"]
        return _misfits(family, model, {"shared_hidden"})
    if not family.experts_key:
        return ["it is dense"]
    found += _misfits(family, model, set())
    if family.name == "deepseek_v3":
        found += _deepseek_gate_objections(model, gate)
    elif gate.name not in _SOFTMAX_GATES or gate.score != "softmax":
        found.append(f"gate={gate.name} with gate.score={gate.score} is not the top-k of a softmax")
    if family.name == "mixtral" and gate.renormalize == "none" and gate.top_k > 0:
        found.append("it always lets a token's weights sum to one (gate.renormalize)")
    if family.name == "qwen2_moe" and model.shared_hidden == 0:
        found.append("it has shared experts (model.shared_hidden)")
    if family.name in ("qwen2_moe", "qwen3_moe") and model.moe_offset != model.moe_every - 1:
        found.append(f"its blocks with experts are the last of each {model.moe_every} (model.moe_offset)")
    capacity = gate.eval_capacity_factor or gate.capacity_factor
    if capacity is not None:
        found.append(f"gate.capacity_factor={capacity}: it never drops a token (evaluate with capacity null first)")
    if gate.bias:
        found.append("its gate has no bias (gate.bias)")
    return found


def _misfits(family: Family, model: GPTConfig, ignored: set[str]) -> list[str]:
    return [
        f"model.{key}={getattr(model, key)}, it has {value}"
        for key, value in family.fixed.items()
        if key not in ignored and getattr(model, key) != value
    ]


def _deepseek_gate_objections(model: GPTConfig, gate: GateConfig) -> list[str]:
    found = []
    if gate.name not in ("aux_free", "group_limited") or gate.score != "sigmoid":
        found.append(f"gate={gate.name} with gate.score={gate.score} is not its sigmoid gate with a bias")
    elif getattr(gate, "num_groups", 1) > 1 and getattr(gate, "group_score_k", 2) != 2:
        found.append("its groups are chosen by their best two experts (gate.group_score_k)")
    width = expert_width(model, gate.top_k)
    if model.shared_hidden == 0 or model.shared_hidden % width:
        found.append(f"model.shared_hidden={model.shared_hidden} must be a multiple of an expert's {width}")
    return found


def write_config(family: Family, model: GPTConfig, gate: GateConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        family: from `choose_family`.
        model: of the run.
        gate: of the run.
        vocab_size: rows of the embedding.
        dtype: of the tensors, as torch names it.
    """
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.name,
        "vocab_size": vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": hidden_width(model),
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads or model.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": _POSITIONS,
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if model.attention == "gqa":
        config["head_dim"] = model.head_dim or model.d_model // model.num_heads
    if family.name in ("mixtral", "qwen2_moe", "qwen3_moe"):
        config["sliding_window"] = None
    if family.experts_key:
        config |= {
            family.experts_key: model.num_experts,
            "num_experts_per_tok": gate.top_k,
            "norm_topk_prob": gate.renormalize != "none",
            "router_aux_loss_coef": gate.load_balance_coef,
            family.width_key: expert_width(model, gate.top_k),
        }
    return {**config, **family.entries(model, gate)}
