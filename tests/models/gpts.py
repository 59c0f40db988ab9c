"""Small language models for tests."""

from __future__ import annotations

from typing import Any

import torch

from moeflow.models.init import initialize
from moeflow.models.transformer import GPT
from moeflow.schema import GATES, GPTConfig

VOCAB = 37


def on_meta(config: GPTConfig, gate: dict[str, Any] | None = None) -> GPT:
    """Build a model without values, as a run does."""
    with torch.device("meta"):
        options = {"name": "naive", "load_balance_scope": "sequence", **(gate or {})}
        return GPT(config, GATES[options["name"]](**options))


def with_values(model: GPT, seed: int = 0) -> GPT:
    """Give a model from the meta device memory and its initial values."""
    tied = model.embed is not None and model.head is not None and model.head.weight is model.embed.weight
    model.to_empty(device="cpu")
    if tied:
        model.head.weight = model.embed.weight
    initialize(model, seed)
    return model


def gpt(gate: dict[str, Any] | None = None, seed: int = 0, **options: Any) -> GPT:
    """Build a small model with values."""
    options = {"vocab_size": VOCAB, "num_layers": 2, "d_model": 32, "num_heads": 4, "num_experts": 4, **options}
    return with_values(on_meta(GPTConfig(**options), gate), seed)


def tokens(batch: int = 3, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Draw tokens, int64 [batch, length]."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
