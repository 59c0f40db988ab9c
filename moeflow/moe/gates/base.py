"""What every gate shares: a linear layer, a choice, weights and losses.

Legend: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """

    sequence_length: int | None = None
    share: float = 1.0


@dataclass(frozen=True)
class GateOutput:
    """What a gate decided.

    Attributes:
        ids_TK: int64 [T, K], experts of each token, best first; -1 where a choice was given up.
        weights_TK: [T, K], weights of the experts' outputs.
        probs_TE: [T, E], probabilities the losses and the entropy are taken of.
        losses: name -> (coefficient, 0-dim loss before the coefficient).
    """

    ids_TK: Tensor
    weights_TK: Tensor
    probs_TE: Tensor
    losses: dict[str, tuple[float, Tensor]] = field(default_factory=dict)


class Gate(nn.Module):
    """Base of the gates; by itself top-k of a softmax.

    A subclass overrides the steps in which it differs: `logits`, `choose`, `aux_losses`.

    Args:
        d_model: D.
        num_experts: E, the total of the layer.
        config: options.

    Attributes:
        may_give_up: whether `choose` may return -1.
        batch_mean: turns this rank's mean over tokens into the mean over the batch; set by `moeflow.parallel`.
        sequence_mean: turns this rank's mean over its part of each sequence into the mean over the sequence; likewise.
    """

    may_give_up = False

    def __init__(self, d_model: int, num_experts: int, config: GateConfig):
        super().__init__()
        if not 1 <= config.top_k <= num_experts:
            raise ConfigError(
                f"gate.top_k={config.top_k}: must be between 1 and model.num_experts={num_experts}",
                f"gate.top_k={max(1, min(config.top_k, num_experts))}",
            )
        self.config = config
        self.top_k = config.top_k
        self.num_experts = num_experts
        self.proj = nn.Linear(d_model, num_experts, bias=config.bias)
        self.batch_mean: losses.BatchMean = losses.alone
        self.sequence_mean: losses.BatchMean = losses.alone

    def forward(self, x_TD: Tensor, context: TokenContext = TokenContext()) -> GateOutput:  # noqa: B008 (frozen)
        """Route tokens.

        Args:
            x_TD: [T, D].
            context: of the tokens.
        """
        logits_TE = self.logits(x_TD)
        probs_TE = torch.softmax(logits_TE, dim=1)
        ids_TK, weights_TK = self.choose(logits_TE, probs_TE)
        aux = {}
        if self.training:
            aux = self.aux_losses(logits_TE, probs_TE, ids_TK, weights_TK, context)
        return GateOutput(ids_TK, weights_TK, probs_TE, aux)

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, E], in fp32 whatever the precision of the run when `fp32` is set."""
        if not self.config.fp32:
            return self.proj(x_TD)
        with torch.autocast(x_TD.device.type, enabled=False):
            bias = self.proj.bias
            return nn.functional.linear(
                x_TD.float(), self.proj.weight.float(), None if bias is None else bias.float()
            )

    def choose(self, logits_TE: Tensor, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return (ids [T, K] int64, weights [T, K])."""
        weights_TK, ids_TK = ops.top_k(probs_TE, self.top_k)
        return ids_TK, self.normalized(weights_TK)

    def normalized(self, weights_TK: Tensor) -> Tensor:
        """Weights that sum to one over the choices, when `normalize` is set."""
        if not self.config.normalize:
            return weights_TK
        return weights_TK / weights_TK.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights_TK.dtype).tiny)

    def aux_losses(
        self, logits_TE: Tensor, probs_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor, context: TokenContext
    ) -> dict[str, tuple[float, Tensor]]:
        """Losses in training: name -> (coefficient, loss)."""
        aux = {}
        if self.config.load_balance_coef:
            loss = self.load_balance_loss(probs_TE, self.balanced_ids(ids_TK), context)
            aux["load_balance"] = (self.config.load_balance_coef, loss)
        if self.config.z_loss_coef:
            aux["z"] = (self.config.z_loss_coef, losses.z_loss(logits_TE) * context.share)
        return aux

    def load_balance_loss(self, probs_TE: Tensor, ids_TK: Tensor, context: TokenContext) -> Tensor:
        """The load-balance loss over the configured scope."""
        if self.config.load_balance_scope == "batch":
            return losses.load_balance(probs_TE, ids_TK, lambda mean: self.mean(mean, context))
        if context.sequence_length is None:
            raise ConfigError(
                "gate.load_balance_scope=sequence: the tokens of this layer do not come in sequences",
                "gate.load_balance_scope=batch",
            )
        return losses.sequence_load_balance(probs_TE, ids_TK, context.sequence_length, self.sequence_mean)

    def mean(self, local_mean: Tensor, context: TokenContext) -> Tensor:
        """Mean over the batch of a quantity whose mean (or sum) over this rank's tokens is given."""
        return self.batch_mean(local_mean * context.share)

    def balanced_ids(self, ids_TK: Tensor) -> Tensor:
        """The choices that the load-balance loss counts."""
        return ids_TK

    def capacity(self, num_tokens: int) -> int | None:
        """Tokens that an expert takes from this rank, or None when nothing is dropped."""
        factor = self.config.capacity_factor
        if not self.training and self.config.eval_capacity_factor is not None:
            factor = self.config.eval_capacity_factor
        if factor is None:
            return None
        return ops.expert_capacity(num_tokens, self.num_experts, self.top_k, factor)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, capacity_factor={self.config.capacity_factor}"
