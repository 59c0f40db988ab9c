"""Parameters and FLOPs of a model, counted from its configuration: nothing is built, torch is not needed.

The tests compare these counts with models that are built and with what each rank of a layout really holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moeflow.errors import ConfigError
from moeflow.schema.gate import GateConfig
from moeflow.schema.model import GPTConfig

_HIDDEN_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class LayerSize:
    """One block.

    Attributes:
        cut: matrix entries that tensor parallelism cuts (attention, a dense MLP), with their biases.
        whole: entries that every tp rank holds (norms, gate, shared experts, latents).
        whole_matrices: those of `whole` that multiply each token.
        num_experts: 0 in a dense block.
        expert: matrix entries of one expert.
        d_hidden: hidden width of one expert, or of the dense MLP.
        shared_hidden: hidden width of the shared experts.
        score_width: query width plus value width over all heads: multiply-adds of one query with one key.
        attention_width: numbers of queries, keys, values and attention's output that one token keeps.
    """

    cut: int
    whole: int
    whole_matrices: int
    num_experts: int
    expert: int
    d_hidden: int
    shared_hidden: int
    score_width: int
    attention_width: int

    @property
    def parameters(self) -> int:
        """All entries of the block."""
        return self.cut + self.whole + self.num_experts * self.expert


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A decoder-only Transformer.

    Attributes:
        layers: blocks in order.
        d_model: width.
        vocab_size: tokens.
        seq_len: tokens of a sample.
        top_k: experts of a token.
        tied: whether embedding and head are one matrix.
        heads: (key, number) that tp must divide.
        costs: what pipeline stages are cut by, of each layer, and of the head.
    """

    layers: tuple[LayerSize, ...]
    d_model: int
    vocab_size: int
    seq_len: int
    top_k: int
    tied: bool
    heads: tuple[tuple[str, int], ...]
    costs: tuple[float, ...]
    head_cost: float

    @property
    def embedding(self) -> int:
        """Entries of the embedding, and of the head."""
        return self.vocab_size * self.d_model

    @property
    def parameters(self) -> int:
        """All parameters, shared ones once."""
        ends = self.embedding * (1 if self.tied else 2) + self.d_model
        return sum(layer.parameters for layer in self.layers) + ends

    @property
    def active(self) -> int:
        """Parameters that one token passes through."""
        idle = sum(max(0, layer.num_experts - self.top_k) * layer.expert for layer in self.layers)
        return self.parameters - idle

    @property
    def num_experts(self) -> int:
        """Experts of a MoE layer; 0 where there is none."""
        return max(layer.num_experts for layer in self.layers)

    def token_flops(self) -> float:
        """Forward FLOPs of one token: 2 a multiply-add, causal attention over half the sequence on average."""
        flops = 2.0 * self.embedding
        for layer in self.layers:
            routed = min(self.top_k, layer.num_experts) * layer.expert
            flops += 2.0 * (layer.cut + layer.whole_matrices + routed) + layer.score_width * self.seq_len
        return flops


def gpt_size(config: GPTConfig, gate: GateConfig, seq_len: int) -> ModelSize:
    """Count a `gpt` model.

    Args:
        config: options; `vocab_size` must be set.
        gate: of the MoE layers.
        seq_len: tokens of a sample.

    Raises:
        ConfigError: the vocabulary is not known.
    """
    if config.vocab_size is None:
        raise ConfigError("model.vocab_size=null: the planner needs a number", "model.vocab_size=256")
    # Widths as moeflow.models.transformer computes them; tests hold both together.
    width = config.d_hidden or math.ceil(8 * config.d_model / 3 / _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE
    layers = tuple(_layer(config, gate, width, layer) for layer in range(config.num_layers))
    attention = _attention(config)
    per_layer = attention.matrices + 3 * config.d_model * (width + (config.shared_hidden if config.num_experts else 0))
    heads = {"model.num_heads": config.num_heads, "model.num_kv_heads": config.num_kv_heads or config.num_heads}
    if any(layer.num_experts == 0 for layer in layers):
        heads["model.d_hidden"] = width
    if config.qk_norm == "all" and config.attention == "gqa":
        heads["model.qk_norm=all"] = 1
    return ModelSize(
        layers,
        config.d_model,
        config.vocab_size,
        seq_len,
        gate.top_k,
        config.tie_embeddings,
        tuple(heads.items()),
        tuple(float(per_layer) for _ in layers),
        float(config.d_model * config.vocab_size),
    )


@dataclass(frozen=True, slots=True)
class _Attention:
    cut: int
    whole: int
    whole_matrices: int
    score_width: int
    width: int
    matrices: int


def _attention(config: GPTConfig) -> _Attention:
    d, heads = config.d_model, config.num_heads
    if config.attention == "mla":
        key, value = config.mla_nope_dim + config.mla_rope_dim, config.mla_value_dim
        rank, q_rank = config.mla_kv_rank, config.mla_q_rank
        queries_from = d if q_rank is None else q_rank
        cut = queries_from * heads * key + rank * heads * (config.mla_nope_dim + value) + heads * value * d
        down = (0 if q_rank is None else d * q_rank) + d * (rank + config.mla_rope_dim)
        norms = rank + (0 if q_rank is None else q_rank)
        kv = heads * (config.mla_nope_dim + value)
        width = heads * (2 * key + value) + kv + 2 * rank + config.mla_rope_dim + 2 * (q_rank or 0)
        return _Attention(cut, down + norms, down, heads * (key + value), width, cut + down)
    head = config.head_dim or d // heads
    q, kv = heads * head, (config.num_kv_heads or heads) * head
    matrices = d * (q + 2 * kv) + q * d
    bias = q + 2 * kv if config.qkv_bias else 0
    norms = {"none": 0, "head": 2 * head, "all": q + kv}[config.qk_norm]
    normed = 0 if config.qk_norm == "none" else q + kv
    return _Attention(matrices + bias, norms, 0, 2 * q, 2 * q + 2 * kv + normed, matrices)


def _layer(config: GPTConfig, gate: GateConfig, width: int, layer: int) -> LayerSize:
    d, attention = config.d_model, _attention(config)
    is_moe = config.num_experts > 0 and layer >= config.first_dense and layer % config.moe_every == config.moe_offset
    norms = 2 * d + attention.whole
    if not is_moe:
        cut = attention.cut + 3 * d * width
        return LayerSize(cut, norms, attention.whole_matrices, 0, 0, width, 0, attention.score_width, attention.width)
    hidden = config.expert_hidden or math.ceil(width / gate.top_k)
    router, router_bias = _gate(config, gate)
    shared = 3 * d * config.shared_hidden
    shared_gate = d if config.shared_hidden and config.shared_gate else 0
    matrices = attention.whole_matrices + router + shared + shared_gate
    return LayerSize(
        attention.cut,
        norms + router + router_bias + shared + shared_gate,
        matrices,
        config.num_experts,
        3 * d * hidden,
        hidden,
        config.shared_hidden,
        attention.score_width,
        attention.width,
    )


def _gate(config: GPTConfig, gate: GateConfig) -> tuple[int, int]:
    """(matrix entries, other entries) of the gate."""
    if gate.name in ("hash", "zero"):
        return 0, 0
    if gate.name == "cosine":
        projection = getattr(gate, "projection_dim", 0)
        return projection * (config.d_model + config.num_experts), 1 + (projection if gate.bias else 0)
    matrices = config.d_model * config.num_experts
    bias = config.num_experts if gate.bias else 0
    return (2 * matrices if gate.name == "noisy" else matrices), bias
