"""Names and layouts of tensors: moeflow's `gpt` model <-> Hugging Face's files.

On disk each expert's matrices are tensors of their own; here they are stacked over the experts: [E, 2, F, D] for the
two that make the hidden row, [E, D, F] for the last.

Legend: E experts, F ffn, D model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.compat.huggingface.families import Family
from moeflow.errors import CheckpointError
from moeflow.models.transformer import is_moe_layer
from moeflow.schema.gate import GateConfig
from moeflow.schema.model import GPTConfig

Tensors = dict[str, Tensor]

_ENDS = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
_LATENT = {
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv": "kv_b_proj",
    "out": "o_proj",
}
_DENSE = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_SHARED = {"qwen2_moe": "shared_expert", "deepseek_v3": "shared_experts"}


@dataclass(frozen=True)
class _Experts:
    """Names of one layer's experts: `pattern` holds {e} and {m}; `matrices` are those of gate, up and down."""

    ours: str
    pattern: str
    matrices: tuple[str, str, str]

    def name(self, expert: int, matrix: str) -> str:
        return self.pattern.format(e=expert, m=matrix)


def _plain_names(model: GPTConfig, family: Family) -> Iterator[tuple[str, str]]:
    """(ours, theirs) of every tensor that is the same on both sides."""
    yield from _ENDS.items()
    if not model.tie_embeddings:
        yield "head.weight", "lm_head.weight"
    for layer in range(model.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight"
        yield f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight"
        for a, b in _attention_names(model):
            yield f"{ours}.attention.{a}", f"{theirs}.self_attn.{b}"
        if not is_moe_layer(model, layer):
            yield from ((f"{ours}.mlp.{a}.weight", f"{theirs}.mlp.{b}.weight") for a, b in _DENSE.items())
            continue
        moe = "block_sparse_moe" if family.name == "mixtral" else "mlp"
        yield f"{ours}.mlp.gate.proj.weight", f"{theirs}.{moe}.gate.weight"
        if family.name == "deepseek_v3":
            yield f"{ours}.mlp.gate.selection_bias_E", f"{theirs}.mlp.gate.e_score_correction_bias"
        if model.shared_hidden:
            shared = f"{theirs}.mlp.{_SHARED[family.name]}"
            yield from ((f"{ours}.mlp.shared.mlp.{a}.weight", f"{shared}.{b}.weight") for a, b in _DENSE.items())
            if model.shared_gate:
                yield f"{ours}.mlp.shared.gate.weight", f"{theirs}.mlp.shared_expert_gate.weight"


def _attention_names(model: GPTConfig) -> Iterator[tuple[str, str]]:
    if model.attention == "mla":
        names = {k: v for k, v in _LATENT.items() if model.mla_q_rank is not None or not k.startswith("q_")}
        names["q"] = "q_proj" if model.mla_q_rank is None else "q_b_proj"
        yield from ((f"{a}.weight", f"{b}.weight") for a, b in names.items())
        return
    yield from ((f"{a}.weight", f"{b}.weight") for a, b in _ATTENTION.items())
    if model.qkv_bias:
        yield from ((f"{a}.bias", f"{_ATTENTION[a]}.bias") for a in "qkv")
    if model.qk_norm != "none":
        yield from ((f"{a}.weight", f"{a}.weight") for a in ("q_norm", "k_norm"))


def _experts(model: GPTConfig, family: Family) -> Iterator[_Experts]:
    for layer in range(model.num_layers):
        if is_moe_layer(model, layer):
            ours, theirs = f"blocks.{layer}.mlp.experts", f"model.layers.{layer}"
            if family.name == "mixtral":
                yield _Experts(ours, f"{theirs}.block_sparse_moe.experts.{{e}}.{{m}}.weight", ("w1", "w3", "w2"))
            else:
                matrices = ("gate_proj", "up_proj", "down_proj")
                yield _Experts(ours, f"{theirs}.mlp.experts.{{e}}.{{m}}.weight", matrices)


def from_huggingface(source: Tensors, family: Family, model: GPTConfig, interleaved: bool) -> Tensors:
    """Return the tensors of our model, fp32, by name.

    Args:
        source: by their names in the files; what is used is taken out of it.
        family: of config.json.
        model: options of our model.
        interleaved: whether the channels that positions turn are pairs side by side (DeepSeek).

    Raises:
        CheckpointError: tensors are missing, of other shapes, or left over.
    """
    tensors = {ours: _take(source, theirs).float() for ours, theirs in _plain_names(model, family)}
    for layer in _experts(model, family):
        gate, up, down = layer.matrices
        tensors[f"{layer.ours}.w_in"] = torch.stack(
            [
                torch.stack([_take(source, layer.name(e, gate)).float(), _take(source, layer.name(e, up)).float()])
                for e in range(model.num_experts)
            ]
        )
        tensors[f"{layer.ours}.w_out"] = torch.stack(
            [_take(source, layer.name(e, down)).float() for e in range(model.num_experts)]
        )
    if model.attention == "mla" and interleaved:
        _turn_pairs(tensors, model, to_halves=True)
    _refuse_left_over(source, model)
    return tensors


def to_huggingface(tensors: Tensors, family: Family, model: GPTConfig, gate: GateConfig) -> Tensors:
    """Return the tensors of the files, by name, fp32.

    Args:
        tensors: of our model, by name.
        family: from `choose_family`.
        model: of the run.
        gate: of the run; its `scaling` is multiplied into the experts where the family has no such option.
    """
    tensors = dict(tensors)
    if model.attention == "mla":
        _turn_pairs(tensors, model, to_halves=False)
    out = {}
    for ours, theirs in _plain_names(model, family):
        if ours.endswith("selection_bias_E") and ours not in tensors:
            out[theirs] = torch.zeros(model.num_experts)  # a gate without one
        else:
            out[theirs] = tensors[ours].contiguous()
    scale = 1.0 if family.name == "deepseek_v3" else gate.scaling
    for layer in _experts(model, family):
        gate_name, up, down = layer.matrices
        w_in, w_out = tensors[f"{layer.ours}.w_in"], tensors[f"{layer.ours}.w_out"]
        for e in range(model.num_experts):
            out[layer.name(e, gate_name)] = w_in[e, 0].contiguous()
            out[layer.name(e, up)] = w_in[e, 1].contiguous()
            out[layer.name(e, down)] = (w_out[e] * scale if scale != 1.0 else w_out[e]).contiguous()
    return out


def _take(source: Tensors, name: str) -> Tensor:
    if name not in source:
        raise CheckpointError(f"tensor '{name}' is missing", "the folder must hold all files of the model")
    return source.pop(name)


def _refuse_left_over(source: Tensors, model: GPTConfig) -> None:
    """Whatever was not used would be lost; tensors that are derived or predict further tokens are known to be."""
    known = ("rotary_emb.inv_freq",)
    beyond = [f"model.layers.{layer}." for layer in range(model.num_layers, model.num_layers + 8)]
    left = [
        name
        for name in source
        if not name.endswith(known)
        and not name.startswith(tuple(beyond))
        and not (name == "lm_head.weight" and model.tie_embeddings)
    ]
    if left:
        raise CheckpointError(
            f"{len(left)} tensors have no place in the model: {', '.join(sorted(left)[:5])}",
            "config.json and the tensors must be of one model",
        )


def _turn_pairs(tensors: Tensors, model: GPTConfig, to_halves: bool) -> None:
    """Reorder the rows that positions turn: pairs (2i, 2i + 1) on disk, (i, i + R/2) here."""
    rope = model.mla_rope_dim
    order = torch.cat([torch.arange(0, rope, 2), torch.arange(1, rope, 2)])
    if not to_halves:
        order = torch.argsort(order)
    for layer in range(model.num_layers):
        prefix = f"blocks.{layer}.attention"
        q = tensors[f"{prefix}.q.weight"]
        heads = q.clone().view(model.num_heads, model.mla_nope_dim + rope, -1)
        heads[:, model.mla_nope_dim :] = heads[:, model.mla_nope_dim :][:, order]
        tensors[f"{prefix}.q.weight"] = heads.view_as(q)
        kv = tensors[f"{prefix}.kv_down.weight"].clone()
        kv[model.mla_kv_rank :] = kv[model.mla_kv_rank :][order]
        tensors[f"{prefix}.kv_down.weight"] = kv
