"""What every gate shares: a linear layer, scores, a choice, weights and losses.

Legend: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from moeflow import ops
from moeflow.errors import ConfigError
from moeflow.moe import losses
from moeflow.schema.gate import GateConfig


@dataclass(frozen=True)
class TokenContext:
    """What a gate may know of its tokens beside their values.

    Attributes:
        sequence_length: tokens of one sequence on this rank, where the tokens come in sequences.
        share: tokens on this rank over the mean of the ranks that the tokens were shared out over; weights this rank's
            means where the split is uneven.
        token_ids_T: int64 [T], ids of the tokens in a vocabulary, where they are known.
        valid_T: bool [T], False where a token is masked: it reaches no expert and counts in no loss.
    """

    sequence_length: int | None = None
    share: float | Tensor = 1.0
    token_ids_T: Tensor | None = None
    valid_T: Tensor | None = None


NO_CONTEXT = TokenContext()


@dataclass(frozen=True)
class GateOutput:
    """What a gate decided.

    Attributes:
        ids_TK: int64 [T, K], experts of each token, best first; -1 where a choice was given up.
        weights_TK: [T, K], weights of the experts' outputs.
        probs_TE: [T, E], probabilities the losses and the entropy are taken of; None where the gate has none.
        losses: name -> (coefficient, 0-dim loss before the coefficient).
        counts_E: int64 [E], choices of each expert, where they were counted along with the choice.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    probs_TE: Tensor | None
    losses: dict[str, tuple[float, Tensor]] = field(default_factory=dict)
    counts_E: Tensor | None = None


class Gate(nn.Module):
    """Base of the gates; by itself top-k of the scores of a linear layer.

    A subclass overrides the steps in which it differs: `build`, `logits`, `choose`, `balanced_ids`, `aux_losses`.

    Args:
        d_model: D.
        num_experts: E, the total of the layer.
        config: options.

    Attributes:
        may_give_up: whether `choose` may return -1.
        limits_itself: whether the choices keep to the capacity already.
        batch_mean: turns this rank's mean over tokens into the mean over the batch; set by `moeflow.parallel`.
        sequence_mean: turns this rank's mean over its part of each sequence into the mean over the sequence; likewise.
        counts_E: int64 [E], choices of each expert on this rank since the last optimizer step; None unless
            `tracks_load`.
    """

    may_give_up = False
    limits_itself = False
    tracks_load = False
    counts_E: Tensor | None

    def __init__(self, d_model: int, num_experts: int, config: Any):
        super().__init__()
        self.config: Any = config
        self.top_k: int = config.top_k
        self.num_experts = num_experts
        self._check_options()
        self.batch_mean: losses.BatchMean = losses.alone
        self.sequence_mean: losses.BatchMean = losses.alone
        self.tracks_load = self.tracks_load or config.load_balance_scope == "global"
        counts_E = torch.zeros(num_experts, dtype=torch.int64) if self.tracks_load else None
        self.register_buffer("counts_E", counts_E, persistent=False)
        self.build(d_model)
        if config.frozen:
            self.requires_grad_(False)

    def _check_options(self) -> None:
        config: GateConfig = self.config
        if not 1 <= config.top_k <= self.num_experts:
            raise ConfigError(
                f"gate.top_k={config.top_k}: must be between 1 and model.num_experts={self.num_experts}",
                f"gate.top_k={max(1, min(config.top_k, self.num_experts))}",
            )
        if config.pad_to_capacity and config.capacity_factor is None:
            raise ConfigError(
                "gate.pad_to_capacity=true: without a capacity there is nothing to pad to", "gate.capacity_factor=1.25"
            )

    def build(self, d_model: int) -> None:
        """Make the gate's parameters."""
        self.proj = nn.Linear(d_model, self.num_experts, bias=self.config.bias)

    def forward(self, x_TD: Tensor, context: TokenContext = NO_CONTEXT) -> GateOutput:
        """Route tokens.

        Args:
            x_TD: [T, D].
            context: of the tokens.
        """
        logits_TE = self.logits(x_TD)
        scores_TE, ids_TK, weights_TK, counts_E = self.route(logits_TE, context)
        return self.output(logits_TE, scores_TE, ids_TK, weights_TK, context, counts_E)

    def route(self, logits_TE: Tensor, context: TokenContext) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return (scores [T, E], ids [T, K], weights [T, K], choices of each expert [E] where they are known)."""
        if self.chooses_by_score() and type(self).scores is Gate.scores and ops.is_fused(logits_TE, self.top_k):
            made = ops.gate(logits_TE, self.top_k, self.config.score, self.choice_bias())
            return made.scores_TE, made.ids_TK, made.weights_TK, made.counts_E
        scores_TE = self.scores(logits_TE)
        return scores_TE, *self.choose(logits_TE, scores_TE, context), None

    def chooses_by_score(self) -> bool:
        """Whether `choose` takes the experts of the highest score plus `choice_bias`, so that one kernel can do it."""
        return type(self).choose is Gate.choose

    def choice_bias(self) -> Tensor | None:
        """fp32 [E], added to the scores for the choice alone; None for none."""
        return None

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, E], in fp32 whatever the precision of the run when `fp32` is set."""
        return self.linear(x_TD, self.proj)

    def linear(self, x_TD: Tensor, layer: nn.Linear) -> Tensor:
        """Apply a linear layer of the gate in the gate's precision."""
        if not self.config.fp32:
            return layer(x_TD)
        with torch.autocast(x_TD.device.type, enabled=False):
            bias = layer.bias
            return nn.functional.linear(x_TD.float(), layer.weight.float(), None if bias is None else bias.float())

    def scores(self, logits_TE: Tensor) -> Tensor:
        """[T, E], the softmax or sigmoid of the logits: what experts are chosen and weighted by."""
        return torch.softmax(logits_TE, dim=1) if self.config.score == "softmax" else torch.sigmoid(logits_TE)

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, context: TokenContext) -> tuple[Tensor, Tensor]:
        """Return (ids [T, K] int64, weights [T, K] before normalization)."""
        weights_TK, ids_TK = ops.top_k(scores_TE, self.top_k)
        return ids_TK, weights_TK

    def output(
        self,
        logits_TE: Tensor,
        scores_TE: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        context: TokenContext,
        counts_E: Tensor | None = None,
    ) -> GateOutput:
        """Normalize, mask, count, and take the losses; counts_E are the choices of each expert, where known."""
        probs_TE = scores_TE if self.config.score == "softmax" else _share_of_sum(scores_TE)
        weights_TK = self.normalized(weights_TK)
        if context.valid_T is not None:
            valid_T1 = context.valid_T[:, None]
            ids_TK = ids_TK.masked_fill(~valid_T1, -1)
            probs_TE = probs_TE * valid_T1
            counts_E = None
        aux: dict[str, tuple[float, Tensor]] = {}
        if self.training:
            self.count(ids_TK, counts_E)
            context = self._weighted(context)
            aux = self.aux_losses(logits_TE, probs_TE, ids_TK, weights_TK, context)
        return GateOutput(ids_TK, weights_TK, probs_TE, aux, counts_E)

    def fixed_output(self, ids_TK: Tensor, dtype: torch.dtype, context: TokenContext) -> GateOutput:
        """What a gate without parameters decided: equal weights, no probabilities."""
        weights_TK = torch.full(ids_TK.shape, self.config.scaling / self.top_k, dtype=dtype, device=ids_TK.device)
        if context.valid_T is not None:
            ids_TK = ids_TK.masked_fill(~context.valid_T[:, None], -1)
        if self.training:
            self.count(ids_TK)
        return GateOutput(ids_TK, weights_TK, None)

    def needs_whole_sequences(self, context: TokenContext) -> bool:
        """Whether the choice for a token depends on the other tokens of its sequence, or on its place in it."""
        return False

    # --- weights -----------------------------------------------------------------------------------------------------

    def normalized(self, weights_TK: Tensor) -> Tensor:
        """Weights as `renormalize` and `scaling` have it, before anything is dropped."""
        config = self.config
        if config.renormalize == "before":
            weights_TK = _share_of_sum(weights_TK)
        return weights_TK * config.scaling if config.scaling != 1.0 and config.renormalize != "after" else weights_TK

    def reweigh(self, weights_TK: Tensor, kept_TK: Tensor) -> Tensor:
        """Weights of the choices that capacity left, with `renormalize=after`; unchanged otherwise."""
        if self.config.renormalize != "after":
            return weights_TK
        return _share_of_sum(torch.where(kept_TK >= 0, weights_TK, 0)) * self.config.scaling

    # --- losses ------------------------------------------------------------------------------------------------------

    def aux_losses(
        self, logits_TE: Tensor, probs_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor, context: TokenContext
    ) -> dict[str, tuple[float, Tensor]]:
        """Losses in training: name -> (coefficient, loss)."""
        aux = {}
        if self.config.load_balance_coef:
            loss = self.load_balance_loss(probs_TE, self.balanced_ids(ids_TK), context)
            aux["load_balance"] = (self.config.load_balance_coef, loss)
        if self.config.z_loss_coef:
            aux["z"] = (self.config.z_loss_coef, losses.z_loss(logits_TE, context.valid_T) * context.share)
        return aux

    def load_balance_loss(self, probs_TE: Tensor, ids_TK: Tensor, context: TokenContext) -> Tensor:
        """The load-balance loss over the configured scope."""
        scope, valid_T = self.config.load_balance_scope, context.valid_T
        if scope == "sequence":
            if context.sequence_length is None:
                raise ConfigError(
                    "gate.load_balance_scope=sequence: the tokens of this layer do not come in sequences",
                    "gate.load_balance_scope=batch",
                )
            return losses.sequence_load_balance(probs_TE, ids_TK, context.sequence_length, self.sequence_mean, valid_T)
        num_tokens = None if valid_T is None else valid_T.sum().clamp(min=1)
        share_E = self._share_since_step() if scope == "global" else None
        return losses.load_balance(probs_TE, ids_TK, lambda mean: self.mean(mean, context), num_tokens, share_E)

    def _share_since_step(self) -> Tensor:
        assert self.counts_E is not None
        counts_E = self.batch_mean(self.counts_E.float())
        return counts_E / counts_E.sum().clamp(min=torch.finfo(torch.float32).tiny)

    def mean(self, local_mean: Tensor, context: TokenContext) -> Tensor:
        """Mean over the batch of a quantity whose mean (or sum) over this rank's tokens is given."""
        return self.batch_mean(local_mean * context.share)

    def _weighted(self, context: TokenContext) -> TokenContext:
        """With masked tokens: a share that weights this rank's means by its valid tokens."""
        if context.valid_T is None:
            return context
        num_valid = context.valid_T.sum().float()
        mean = self.batch_mean(num_valid)
        return replace(context, share=num_valid / mean.clamp(min=torch.finfo(torch.float32).tiny))

    def balanced_ids(self, ids_TK: Tensor) -> Tensor:
        """The choices that the load-balance loss counts."""
        return ids_TK

    # --- load and capacity -------------------------------------------------------------------------------------------

    def count(self, ids_TK: Tensor, counts_E: Tensor | None = None) -> None:
        """Add to the load since the last optimizer step, once for each token."""
        if self.counts_E is not None and not in_backward():
            self.counts_E += ops.histogram(ids_TK, self.num_experts) if counts_E is None else counts_E

    def after_step(self, counts_E: Tensor) -> None:
        """Take the load of the finished optimizer step over all ranks, int64 [E]; the counters start anew."""
        assert self.counts_E is not None
        self.counts_E.zero_()

    def capacity(self, num_tokens: int) -> int | None:
        """Tokens that an expert takes from this rank, or None when nothing is dropped."""
        factor = self.config.capacity_factor
        if not self.training and self.config.eval_capacity_factor is not None:
            factor = self.config.eval_capacity_factor
        if factor is None:
            return None
        return max(
            ops.expert_capacity(num_tokens, self.num_experts, self.top_k, factor),
            min(self.config.min_capacity, num_tokens),
        )

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, capacity_factor={self.config.capacity_factor}"


def _share_of_sum(weights: Tensor) -> Tensor:
    """Each entry over the sum of its row; a row of zeros stays."""
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def in_backward() -> bool:
    """Whether a backward pass is going on, which runs a forward pass anew under activation checkpointing."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1
