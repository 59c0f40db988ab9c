"""Text from a language model, one token after another.

Legend: B sequences, S tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from moeflow.errors import ConfigError
from moeflow.models.attention import KeyValueCache
from moeflow.moe import MoELayer


class Tokenizer(Protocol):
    """A reversible map between text and tokens below `vocab_size`."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> Iterable[int]: ...

    def decode(self, tokens: Iterable[int]) -> str: ...


class Windows(Protocol):
    """A data set of windows of a text, of `seq_len` tokens each."""

    @property
    def seq_len(self) -> int: ...

    def fetch(self, indices: Tensor, epoch: int) -> dict[str, Tensor]: ...


class Text(Protocol):
    """The part of a run's data that samples are made with."""

    @property
    def eval(self) -> Windows: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


def generate(
    model: nn.Module,
    tokens_BS: Tensor,
    max_new: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    context: int | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Continue sequences, in evaluation mode and without dropping a choice of a gate.

    Each token is computed once, since keys and values are kept.  A model that was trained on windows of `context`
    tokens never sees more: when they are full, it starts again from the later half of them.

    Args:
        model: `model(tokens [B, S], cache)` gives logits [B, S, V].
        tokens_BS: int64 [B, S], S >= 1, on the model's device.
        max_new: tokens to add.
        temperature: logits are divided by it; 0 takes the most probable token.
        top_k: draw from so many most probable tokens; None from all.
        generator: of the draws; None takes torch's own.
        context: tokens that the model may see at once; None for all.
        vocab_size: tokens from this number on are never drawn, where the model knows more than the text has.

    Returns:
        int64 [B, S + max_new].

    Raises:
        ConfigError: there is nothing to continue, or an argument is out of its bounds.
    """
    _check(tokens_BS, max_new, temperature, top_k, context)
    given = tokens_BS.shape[1]
    context = given + max_new if context is None else context
    out_BS = torch.cat([tokens_BS, tokens_BS.new_zeros(tokens_BS.shape[0], max_new)], dim=1)
    cache, begin = KeyValueCache(context), max(0, given - context)
    with torch.no_grad(), _inference(model):
        for end in range(given, given + max_new):
            if end - begin > context:
                cache, begin = KeyValueCache(context), end - max(1, context // 2)
            logits_BSV = model(out_BS[:, begin + cache.length : end], cache)
            out_BS[:, end] = _draw(logits_BSV[:, -1, :vocab_size].float(), temperature, top_k, generator)
    return out_BS


def continue_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    context: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Return the prompt and what the model writes after it.

    Args:
        model: as for `generate`.
        tokenizer: of the text that the model was trained on.
        prompt: not empty.
        num_tokens: tokens to add.
        context: as for `generate`, like the next two.
        temperature: of the draws.
        top_k: tokens to draw from.
        seed: of the draws.

    Raises:
        MoeflowError: the prompt is empty or holds a character that the model does not know.
    """
    device = next(model.parameters()).device
    tokens_BS = torch.tensor([[int(token) for token in tokenizer.encode(prompt)]], dtype=torch.int64, device=device)
    # Drawn on the CPU: the same seed then means the same draws on every device.
    generator = torch.Generator().manual_seed(seed)
    out_BS = generate(model, tokens_BS, num_tokens, temperature, top_k, generator, context, tokenizer.vocab_size)
    return tokenizer.decode(out_BS[0].tolist())


def _draw(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draw one token a sequence; int64 [B]."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    probs_BV = torch.softmax(logits_BV / temperature, dim=-1)
    if generator is not None:
        probs_BV = probs_BV.to(generator.device)
    return torch.multinomial(probs_BV, 1, generator=generator)[:, 0].to(logits_BV.device)


@contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and dropless gates, for a while: a sequence's text must not depend on its neighbors."""
    was_training = model.training
    gates = [module.gate for module in model.modules() if isinstance(module, MoELayer)]
    unlimited = {"capacity_factor": None, "eval_capacity_factor": None, "pad_to_capacity": False}
    configs = [gate.config for gate in gates]
    model.eval()
    try:
        for gate in gates:
            gate.config = dataclasses.replace(gate.config, **unlimited)
        yield
    finally:
        for gate, config in zip(gates, configs, strict=True):
            gate.config = config
        model.train(was_training)


def _check(tokens_BS: Tensor, max_new: int, temperature: float, top_k: int | None, context: int | None) -> None:
    if tokens_BS.ndim != 2 or tokens_BS.shape[1] == 0:
        raise ConfigError(
            f"tokens of shape {tuple(tokens_BS.shape)}: there must be at least one token to continue",
            "pass a prompt of at least one token",
        )
    if max_new < 0:
        raise ConfigError(f"number of new tokens {max_new}: must not be negative", "pass 0 or more")
    if temperature < 0:
        raise ConfigError(f"temperature {temperature}: must not be negative", "0 takes the most probable token")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k {top_k}: must be at least 1", "leave it out to draw from all tokens")
    if context is not None and context < 1:
        raise ConfigError(f"context {context}: must be at least 1", "leave it out to see all tokens")
