"""What a language model is trained and measured by.

Legend: B sequences, S tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeflow.models.generate import Text, continue_text

_PROMPT_TOKENS = 24


def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Cross-entropy of each token in nats, float32 [N]."""
    return functional.cross_entropy(logits_NV.float(), targets_N, reduction="none")


class LanguageModelTask:
    """Prediction of the next token.

    Attributes:
        unit: what throughput is counted in.
        cross_entropy: of logits [N, V] and targets int64 [N], float32 [N]; replaced where the vocabulary is cut.
    """

    unit = "tokens"

    def __init__(self) -> None:
        self.cross_entropy: Callable[[Tensor, Tensor], Tensor] = cross_entropy

    def loss(self, logits_BSV: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Mean cross-entropy over the tokens, in nats; float32 0-dim.

        Args:
            logits_BSV: [B, S, V].
            batch: "targets" int64 [B, S].
        """
        return self.cross_entropy(logits_BSV.flatten(0, 1), batch["targets"].flatten()).mean()

    def metrics(self, logits_BSV: Tensor, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Sums and counts: "loss" over the tokens.

        Args:
            logits_BSV: [B, S, V].
            batch: "targets" int64 [B, S]; "valid" bool [B], where some sequences do not count.
        """
        targets_BS = batch["targets"]
        losses_BS = self.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten()).view_as(targets_BS)
        valid_B1 = batch.get("valid", torch.ones_like(targets_BS[:, 0], dtype=torch.bool))[:, None]
        total = losses_BS.where(valid_B1, 0.0).sum(dtype=torch.float64)
        return {"loss": (total, valid_B1.sum() * targets_BS.shape[1])}

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Metrics that are no means themselves: "perplexity", exp of the mean loss."""
        if "loss" not in means:
            return {}
        return {"perplexity": math.exp(means["loss"]) if means["loss"] < 700 else math.inf}

    def num_units(self, batch: dict[str, Tensor]) -> int:
        """Tokens of a batch."""
        return batch["targets"].numel()

    def samples(self, model: nn.Module, data: Text, num_tokens: int = 300, seed: int = 0) -> str:
        """What the model writes after the first words of the held-out text.

        Every rank of a run must call it, since the experts may be on other ranks; all get the same text.

        Args:
            model: in any mode.
            data: the run's data (a `moeflow.data.DataBundle` of text).
            num_tokens: length of the continuation.
            seed: of the draws.
        """
        prompt, context = opening(data), data.eval.seq_len
        return continue_text(model, data.tokenizer, prompt, num_tokens, context=context, seed=seed)


def opening(data: Text) -> str:
    """The first words of the held-out text, for a prompt."""
    window_S = data.eval.fetch(torch.zeros(1, dtype=torch.int64), 0)["inputs"][0]
    return data.tokenizer.decode(window_S[:_PROMPT_TOKENS].tolist())
