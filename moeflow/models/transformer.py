"""Decoder-only Transformer with MoE layers.

Legend: B sequences, S tokens of a sequence, D model, V vocabulary.

Any of `embed`, `norm` and `head` may be None and `blocks` may hold some of the layers only: a pipeline stage is this
model with the parts of other stages taken away.  Blocks are named by their number in the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moeflow.errors import ConfigError
from moeflow.models.attention import Attention, KeyValueCache
from moeflow.models.latent_attention import LatentAttention
from moeflow.models.linear import Embedding, Linear
from moeflow.models.lm_task import LanguageModelTask
from moeflow.models.mlp import DenseMLP
from moeflow.models.regions import Region, VocabularyRegion
from moeflow.models.rotary import Rotary
from moeflow.moe import MoELayer
from moeflow.moe.shared import SharedExperts
from moeflow.schema.gate import GateConfig
from moeflow.schema.model import GPTConfig

_HIDDEN_MULTIPLE = 16
# Gates that look at all tokens of a sequence, or of the batch, in evaluation too.
_NOT_CAUSAL = ("expert_choice", "soft")


def hidden_width(config: GPTConfig) -> int:
    """Hidden width that a token passes through in each layer: 8/3 d_model, unless the configuration says otherwise.

    A SwiGLU of that width has the parameters of a plain MLP of 4 d_model.
    """
    if config.d_hidden is not None:
        return config.d_hidden
    return math.ceil(8 * config.d_model / 3 / _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE


def expert_width(config: GPTConfig, top_k: int) -> int:
    """Hidden width of one expert: the layer's over top_k, so that a token costs the same as in a dense model."""
    return config.expert_hidden or math.ceil(hidden_width(config) / top_k)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        config: options.
        gate: of the MoE layer.
        is_moe: whether the MLP is an MoE layer.
    """

    def __init__(self, config: GPTConfig, gate: GateConfig, is_moe: bool):
        super().__init__()
        std = config.init_std
        # Two branches a layer add to the residual stream; this keeps its variance at the depth of the model.
        out_std = std / math.sqrt(2 * config.num_layers)
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = _attention(config, std, out_std)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.mlp: DenseMLP | MoELayer
        if is_moe:
            self.mlp = MoELayer(
                config.d_model,
                config.num_experts,
                expert_width(config, gate.top_k),
                gate,
                activation="swiglu",
                bias=False,
                init_std=std,
                out_init_std=out_std,
                shared=_shared(config, std, out_std),
            )
        else:
            self.mlp = DenseMLP(config.d_model, hidden_width(config), std, out_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BSD: Tensor,
        rotary: Rotary,
        cache: KeyValueCache | None = None,
        layer: str = "",
        tokens_BS: Tensor | None = None,
    ) -> Tensor:
        """Map [B, S, D] to [B, S, D]; arguments are those of `Attention`, and the tokens where they are known."""
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), rotary, cache, layer))
        y_BSD = self.mlp_norm(x_BSD)
        if isinstance(self.mlp, MoELayer) and self.mlp.gate.config.name == "hash":
            y_BSD = self.mlp(y_BSD, token_ids=_known(tokens_BS, y_BSD))
        else:
            y_BSD = self.mlp(y_BSD)
        return x_BSD + self.dropout(y_BSD)


def _attention(config: GPTConfig, std: float, out_std: float) -> Attention | LatentAttention:
    if config.attention == "mla":
        return LatentAttention(
            config.d_model,
            config.num_heads,
            config.mla_q_rank,
            config.mla_kv_rank,
            config.mla_nope_dim,
            config.mla_rope_dim,
            config.mla_value_dim,
            config.dropout,
            std,
            out_std,
        )
    return Attention(
        config.d_model,
        config.num_heads,
        config.num_kv_heads or config.num_heads,
        config.dropout,
        std,
        out_std,
        config.head_dim,
        config.qkv_bias,
        config.qk_norm,
        config.norm_eps,
    )


def _shared(config: GPTConfig, std: float, out_std: float) -> SharedExperts | None:
    if config.shared_hidden == 0:
        return None
    return SharedExperts(
        DenseMLP(config.d_model, config.shared_hidden, std, out_std), config.d_model, config.shared_gate
    )


@dataclass(frozen=True)
class StageCosts:
    """Cost of each layer, and of what the first and the last stage have beside their layers; in one unit."""

    layers: list[float]
    first: float
    last: float


class GPT(nn.Module):
    """Decoder-only Transformer: embedding, blocks, norm, and a projection to the vocabulary.

    Args:
        config: options; `vocab_size` must be set.
        gate: of the MoE layers.

    Attributes:
        task: loss and metrics.

    Raises:
        ConfigError: options that do not fit together.
    """

    def __init__(self, config: GPTConfig, gate: GateConfig):
        super().__init__()
        _check(config, gate)
        assert config.vocab_size is not None
        self.config = config
        self.task = LanguageModelTask()
        self.embed: Embedding | None = Embedding(config.vocab_size, config.d_model, config.init_std)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config, gate, is_moe_layer(config, layer)) for layer in range(config.num_layers)}
        )
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.head: Linear | None = Linear(config.d_model, config.vocab_size, config.init_std)
        if config.tie_embeddings:
            # A last stage has no embedding; its head must draw the embedding's values all the same.
            self.head.drawn_as = "embed"
            self.head.weight = self.embed.weight

    def tensor_regions(self) -> list[Region | VocabularyRegion]:
        """What tensor parallelism can cut: attention by heads, dense MLPs, the vocabulary."""
        config = self.config
        assert config.vocab_size is not None
        if config.qk_norm == "all" and config.attention == "gqa":
            raise ConfigError(
                "model.qk_norm=all: a norm over all heads is not one over the heads of a rank", "parallel.tp=1"
            )
        regions: list[Region | VocabularyRegion] = []
        heads = {"model.num_heads": config.num_heads, "model.num_kv_heads": config.num_kv_heads or config.num_heads}
        columns = ("q", "kv") if config.attention == "mla" else ("q", "k", "v")
        for layer, block in self.blocks.items():
            regions.append(Region(f"blocks.{layer}.attention", columns, ("out",), heads))
            if isinstance(block.mlp, DenseMLP):
                hidden = {"model.d_hidden": hidden_width(config)}
                regions.append(Region(f"blocks.{layer}.mlp", ("gate", "up"), ("down",), hidden))
        ends = (("embed", "embedding", self.embed), ("head", "logits", self.head))
        regions += [
            VocabularyRegion(name, kind, config.vocab_size) for name, kind, module in ends if module is not None
        ]
        return regions

    def forward(self, inputs: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Run this part of the model.

        Args:
            inputs: int64 [B, S] tokens; [B, S, D] where the embedding is on another stage.
            cache: tokens that came before; these are added to it.

        Returns:
            Logits [B, S, V] for the token after each; [B, S, D] where the head is on another stage.
        """
        return self.run(inputs, list(self.blocks), cache)

    def run(self, inputs: Tensor, layers: Sequence[str], cache: KeyValueCache | None = None) -> Tensor:
        """Run some of the blocks: with the embedding before the model's first one, norm and head after its last.

        Args:
            inputs: int64 [B, S] tokens before the first block, else [B, S, D].
            layers: names of consecutive blocks.
            cache: as in `forward`.
        """
        x_BSD, tokens_BS = inputs, None
        if layers[0] == "0":
            assert self.embed is not None
            x_BSD, tokens_BS = self.dropout(self.embed(inputs)), inputs
        rotary = Rotary(0 if cache is None else cache.length, self.config.rope_theta)
        recompute = self.config.activation_checkpointing and self.training and torch.is_grad_enabled()
        for layer in layers:
            block = self.blocks[layer]
            if recompute:
                x_BSD = _recomputed(block, x_BSD, rotary, tokens_BS)
            else:
                x_BSD = block(x_BSD, rotary, cache, layer, tokens_BS)
        if cache is not None:
            cache.advance(inputs.shape[1])
        if layers[-1] != str(self.config.num_layers - 1):
            return x_BSD
        assert self.norm is not None and self.head is not None
        return self.head(self.norm(x_BSD))

    @property
    def tied(self) -> dict[str, str]:
        """Parameters that are another one under a second name."""
        return {"head.weight": "embed.weight"} if self.config.tie_embeddings else {}

    # --- what pipeline parallelism asks (moeflow.parallel.pipeline) --------------------------------------------------

    def stage_costs(self) -> StageCosts:
        """Forward multiply-adds of a token in each block, and in the head; looking up an embedding costs nothing."""
        config = self.config
        prefix = f"blocks.{next(iter(self.blocks))}.attention."
        attention = sum(p.numel() for name, p in self.named_parameters() if name.startswith(prefix) and p.ndim == 2)
        mlp = 3 * config.d_model * (hidden_width(config) + (config.shared_hidden if config.num_experts else 0))
        assert config.vocab_size is not None
        return StageCosts([attention + mlp] * config.num_layers, first=0.0, last=config.d_model * config.vocab_size)

    def keep(self, layers: Sequence[str]) -> None:
        """Take all other blocks away, and the ends that do not belong to the blocks that stay."""
        for layer in set(self.blocks) - set(layers):
            del self.blocks[layer]
        if "0" not in layers:
            self.embed = None
        if str(self.config.num_layers - 1) not in layers:
            self.norm = self.head = None

    def boundary_shape(self, batch: int, length: int) -> tuple[int, int, int]:
        """Shape of what one stage sends to the next, for [batch, length] tokens."""
        return batch, length, self.config.d_model


def is_moe_layer(config: GPTConfig, layer: int) -> bool:
    """Whether a layer's MLP is an MoE layer."""
    return config.num_experts > 0 and layer >= config.first_dense and layer % config.moe_every == config.moe_offset


def _known(tokens_BS: Tensor | None, x_BSD: Tensor) -> Tensor:
    """The tokens, which the hash gate routes by; positions in their stead would depend on the layout."""
    if tokens_BS is None or tokens_BS.shape != x_BSD.shape[:-1]:
        raise ConfigError(
            "gate=hash: the tokens are not known to every rank of this layout",
            "parallel.pp=1 parallel.sequence_parallel=false, or another gate",
        )
    return tokens_BS


def _recomputed(block: nn.Module, x_BSD: Tensor, rotary: Rotary, tokens_BS: Tensor | None) -> Tensor:
    """Run a block whose activations are computed again in the backward pass instead of being kept.

    The auxiliary losses count once: the backward pass runs over the graph of the first forward pass alone.
    """
    layers = [module for module in block.modules() if isinstance(module, MoELayer)]

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_untouched(layers)

    return checkpoint(block, x_BSD, rotary, None, "", tokens_BS, use_reentrant=False, context_fn=contexts)


@contextmanager
def _statistics_untouched(layers: list[MoELayer]) -> Iterator[None]:
    """Keep the statistics of the last true forward pass, which may be one of a later micro-batch."""
    kept = [layer.last_stats for layer in layers]
    try:
        yield
    finally:
        for layer, stats in zip(layers, kept, strict=True):
            layer.last_stats = stats


def _check(config: GPTConfig, gate: GateConfig) -> None:
    if config.num_experts > 0 and gate.name in _NOT_CAUSAL:
        raise ConfigError(
            f"gate={gate.name}: what a token gets depends on later tokens, which a language model has to predict",
            "gate=naive, or any other but " + " and ".join(_NOT_CAUSAL),
        )
    if config.vocab_size is None:
        raise ConfigError(
            "model.vocab_size=null: the data have no vocabulary to take it from", "data=text, or model.vocab_size=256"
        )
    _check_heads(config)
    if not 0 <= config.moe_offset < config.moe_every:
        raise ConfigError(
            f"model.moe_offset={config.moe_offset}: must be below model.moe_every={config.moe_every}",
            f"model.moe_offset={config.moe_every - 1}",
        )


def _check_heads(config: GPTConfig) -> None:
    if config.attention == "mla":
        for key in ("head_dim", "num_kv_heads"):
            if getattr(config, key) is not None:
                raise ConfigError(f"model.{key} has no meaning with model.attention=mla", f"model.{key}=null")
        if config.qkv_bias or config.qk_norm != "none":
            raise ConfigError(
                "model.qkv_bias and model.qk_norm have no meaning with model.attention=mla",
                "model.qkv_bias=false model.qk_norm=none",
            )
    width = config.mla_rope_dim if config.attention == "mla" else config.head_dim
    if width is not None and width % 2:
        key = "mla_rope_dim" if config.attention == "mla" else "head_dim"
        raise ConfigError(
            f"model.{key}={width}: must be even, since rotary positions turn pairs of channels",
            f"model.{key}={width + 1}",
        )
    if width is None and config.d_model % (2 * config.num_heads):
        raise ConfigError(
            f"model.d_model={config.d_model}: must be a multiple of 2 * model.num_heads = {2 * config.num_heads}, "
            "since rotary positions turn pairs of a head's channels",
            f"model.d_model={-(-config.d_model // (2 * config.num_heads)) * 2 * config.num_heads}",
        )
    if config.num_kv_heads is not None and config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={config.num_kv_heads}: must divide model.num_heads={config.num_heads}",
            "model.num_kv_heads=null",
        )
