"""Group-limited top-k.

Legend: T tokens, E experts, G groups, N experts of a group, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow import ops
from moeflow.errors import ConfigError
from moeflow.moe.gates.base import Gate, TokenContext


class GroupLimitedGate(Gate):
    """Top-k among the experts of the best groups (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

    Experts form `num_groups` groups of consecutive ones.  A group's score is the sum of its best `group_score_k` scores
    (1: DeepSeek-V2; 2: DeepSeek-V3; top_k / top_groups: Megatron-LM); the token's experts come from the `top_groups`
    best groups.
    """

    def _check_options(self) -> None:
        super()._check_options()
        config, num_experts = self.config, self.num_experts
        if num_experts % config.num_groups:
            valid = [g for g in range(1, num_experts + 1) if num_experts % g == 0]
            raise ConfigError(
                f"gate.num_groups={config.num_groups} does not divide model.num_experts={num_experts}",
                f"gate.num_groups={'|'.join(map(str, valid))}",
            )
        if config.top_groups > config.num_groups:
            raise ConfigError(
                f"gate.top_groups={config.top_groups} is more than gate.num_groups={config.num_groups}",
                f"gate.top_groups={config.num_groups}",
            )
        size = num_experts // config.num_groups
        if config.top_k > config.top_groups * size:
            raise ConfigError(
                f"gate.top_k={config.top_k}: {config.top_groups} groups of {size} experts have only "
                f"{config.top_groups * size}",
                f"gate.top_k={config.top_groups * size}",
            )
        if config.num_groups > 1 and config.group_score_k > size:
            raise ConfigError(
                f"gate.group_score_k={config.group_score_k} is more than the {size} experts of a group",
                f"gate.group_score_k={size}",
            )

    def choose(self, logits_TE: Tensor, scores_TE: Tensor, context: TokenContext) -> tuple[Tensor, Tensor]:
        selection_TE = self.selection(scores_TE.detach())
        if self.config.num_groups > self.config.top_groups:
            selection_TE = torch.where(self._allowed(selection_TE), selection_TE, float("-inf"))
        _, ids_TK = ops.top_k(selection_TE, self.top_k)
        return ids_TK, scores_TE.gather(1, ids_TK)

    def selection(self, scores_TE: Tensor) -> Tensor:
        """What experts and groups are chosen by."""
        bias_E = self.choice_bias()
        return scores_TE if bias_E is None else scores_TE + bias_E

    def chooses_by_score(self) -> bool:
        own = type(self).choose is GroupLimitedGate.choose and type(self).selection is GroupLimitedGate.selection
        return own and self.config.num_groups == self.config.top_groups

    def _allowed(self, selection_TE: Tensor) -> Tensor:
        """Whether each expert's group is among the token's best: bool [T, E]."""
        config, num_tokens = self.config, selection_TE.shape[0]
        size = self.num_experts // config.num_groups
        best, _ = ops.top_k(selection_TE.reshape(-1, size), config.group_score_k)
        groups_TG = best.sum(1).view(num_tokens, config.num_groups)
        _, ids_TG = ops.top_k(groups_TG, config.top_groups)
        allowed_TG = torch.zeros_like(groups_TG, dtype=torch.bool).scatter(1, ids_TG, True)
        return allowed_TG.repeat_interleave(size, dim=1)
