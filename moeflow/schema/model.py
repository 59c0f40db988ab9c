"""Models: one class an option of the `model` group.  `num_experts` is always the total of a layer, never per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from moeflow.schema.fields import option


@dataclass(slots=True)
class ModelConfig:
    """What every model has.  `name` picks the class in `moeflow.models`."""

    name: str = option("convnet", "model class")
    num_experts: int = option(
        8, "experts of each MoE layer in all (0 makes the layer a plain MLP)", minimum=0, maximum=2**20
    )


@dataclass(slots=True)
class ConvNetConfig(ModelConfig):
    """Small convolutional network with MoE blocks, for 32x32 images."""

    name: str = option("convnet", "model class")
    num_classes: int = option(10, "classes", minimum=2)
    widths: List[int] = option(
        [32, 64, 128], "channels of each stage; each next one halves height and width", minimum=16
    )
    depths: List[int] = option([1, 1, 2], "residual convolutions of each stage", minimum=0)
    moe_stages: List[int] = option([2], "stages, from 0, whose residual convolutions are each followed by an MoE block")
    mlp_ratio: float = option(
        2.0, "hidden width of a dense MLP, or of a token's gate.top_k experts together, over the channels", above=0.0
    )
    label_smoothing: float = option(
        0.1, "probability spread over all classes in the training loss", minimum=0.0, below=1.0
    )


@dataclass(slots=True)
class LeNetConfig(ModelConfig):
    """LeNet-style network of FastMoE's multi-node tutorial: two 5x5 convolutions, an MoE layer 400 -> 84, logits."""

    name: str = option("lenet", "model class")
    num_experts: int = option(64, "experts of the MoE layer in all (32 on each of 2 workers)", minimum=0, maximum=2**20)
    num_classes: int = option(10, "classes", minimum=2)


@dataclass(slots=True)
class GPTConfig(ModelConfig):
    """Decoder-only Transformer: rotary positions, RMSNorm, SwiGLU, an MoE layer in every n-th block."""

    name: str = option("gpt", "model class")
    vocab_size: Optional[int] = option(None, "tokens the model knows; null takes those of the data", minimum=1)
    num_layers: int = option(4, "blocks", minimum=1)
    d_model: int = option(128, "width", minimum=2)
    num_heads: int = option(4, "attention heads", minimum=1)
    num_kv_heads: Optional[int] = option(
        None, "heads of keys and values, each shared by several queries; null takes num_heads", minimum=1
    )
    head_dim: Optional[int] = option(None, "width of one head; null takes d_model / num_heads", minimum=2)
    attention: str = option("gqa", "grouped queries, or multi-head latent attention", choices=("gqa", "mla"))
    qkv_bias: bool = option(False, "biases on queries, keys and values (Qwen2)")
    qk_norm: str = option(
        "none",
        "RMSNorm of queries and keys: of each head (Qwen3), or over all heads (OLMoE)",
        choices=("none", "head", "all"),
    )
    mla_q_rank: Optional[int] = option(None, "attention=mla: width queries pass through; null is direct", minimum=1)
    mla_kv_rank: int = option(64, "attention=mla: width that keys and values are made from", minimum=1)
    mla_nope_dim: int = option(32, "attention=mla: channels of a head without a position", minimum=1)
    mla_rope_dim: int = option(16, "attention=mla: channels of a head that are turned by position", minimum=2)
    mla_value_dim: int = option(32, "attention=mla: channels of a head's value", minimum=1)
    d_hidden: Optional[int] = option(
        None,
        "hidden width of a dense MLP, and of the gate.top_k experts of a token together; null takes 8/3 d_model",
        minimum=1,
    )
    expert_hidden: Optional[int] = option(
        None, "hidden width of one expert; null takes d_hidden / gate.top_k", minimum=1
    )
    moe_every: int = option(1, "one block in so many has an MoE layer", minimum=1)
    moe_offset: int = option(0, "number of the first block with an MoE layer, below moe_every", minimum=0)
    first_dense: int = option(0, "blocks at the start that have a dense MLP in any case (DeepSeek)", minimum=0)
    shared_hidden: int = option(
        0, "hidden width of the experts that every token passes through, together; 0 has none", minimum=0
    )
    shared_gate: bool = option(False, "weigh the shared experts by a sigmoid gate (Qwen2-MoE)")
    tie_embeddings: bool = option(True, "one matrix for the embedding and the head")
    rope_theta: float = option(10000.0, "base of the rotary frequencies", above=0.0)
    norm_eps: float = option(1e-5, "epsilon of the norms", above=0.0)
    init_std: float = option(0.02, "deviation of initial values (at a branch's end / sqrt(2 num_layers))", above=0.0)
    dropout: float = option(0.0, "probability of dropping activations and attention weights", minimum=0.0, below=1.0)
    activation_checkpointing: bool = option(False, "compute activations again in backward: less memory, more time")


MODELS: dict[str, type[ModelConfig]] = {"convnet": ConvNetConfig, "lenet": LeNetConfig, "gpt": GPTConfig}
