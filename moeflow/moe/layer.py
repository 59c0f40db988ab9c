"""The MoE layer: the token path from top to bottom.

Legend: T tokens, D model, E experts, K top-k, R rows (dispatched choices), O output width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moeflow import ops
from moeflow.errors import ConfigError
from moeflow.moe import losses
from moeflow.moe.aux_loss import attach_loss
from moeflow.moe.dispatcher import Dispatcher, LocalDispatcher
from moeflow.moe.experts import Experts, MLPExperts
from moeflow.moe.gates import Gate, GateOutput, TokenContext, build_gate
from moeflow.moe.stats import MoEStats
from moeflow.schema.gate import GateConfig


class MoELayer(nn.Module):
    """A layer in which each token passes through a few of many experts.

        x [T, D] -> gate -> plan -> dispatch [R, D] -> experts -> combine -> y [T, O]

    Args:
        d_model: width D of the tokens.
        num_experts: experts in all.
        d_hidden: hidden width of one expert; None takes 4 * d_model.
        gate: a gate's configuration or name (its defaults), or a `Gate`.
        activation: of the experts; gated ones (swiglu, geglu, reglu) have a third matrix.
        d_out: width of the output; None takes d_model.
        bias: whether the experts have biases.
        experts: an `Experts` module instead of stacked MLPs.

    Attributes:
        last_stats: `MoEStats` of the last forward pass; None before the first.
        aux_loss_scale: what the main loss is multiplied by before backward; the trainer sets it.

    Example:
        >>> layer = MoELayer(d_model=64, num_experts=8, gate="switch")
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        d_hidden: int | None = None,
        gate: GateConfig | Gate | str = "naive",
        activation: str = "gelu",
        d_out: int | None = None,
        bias: bool = True,
        experts: Experts | None = None,
        init_std: float | None = None,
        out_init_std: float | None = None,
    ):
        super().__init__()
        if num_experts < 1:
            raise ConfigError(f"num_experts={num_experts}: an MoE layer needs at least one expert", "num_experts=8")
        self.d_model, self.num_experts = d_model, num_experts
        self.gate = gate if isinstance(gate, Gate) else build_gate(gate, d_model, num_experts)
        self.experts: Experts = experts or MLPExperts(
            num_experts, d_model, d_hidden or 4 * d_model, d_out, activation, bias, init_std, out_init_std
        )
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.aux_loss_scale = 1.0
        self.last_stats: MoEStats | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Route tokens through their experts.

        Args:
            x: [..., D]; all leading dimensions are tokens, and all but the first of them make one sequence.

        Returns:
            [..., O].

        Raises:
            ConfigError: the last dimension is not d_model.
        """
        if x.shape[-1] != self.d_model:
            raise ConfigError(
                f"input of shape {tuple(x.shape)}: the last dimension must be d_model={self.d_model}",
                f"build the layer with d_model={x.shape[-1]}",
            )
        num_tokens = x.shape[:-1][-1:].numel()
        x, share = self.dispatcher.split_tokens(x)
        lead = x.shape[:-1]
        x_TD = x.reshape(-1, self.d_model)
        out = self.gate(x_TD, TokenContext(math.prod(lead[1:]) if len(lead) > 1 else None, share))
        y_TO = self._through_experts(x_TD, out)
        if out.losses:
            total = torch.stack([coefficient * loss for coefficient, loss in out.losses.values()]).sum()
            y_TO = attach_loss(y_TO, total, self.aux_loss_scale / self.dispatcher.token_ranks)
        y = y_TO.reshape(*lead, self.experts.d_out)
        return self.dispatcher.merge_tokens(y, num_tokens)

    def _through_experts(self, x_TD: Tensor, out: GateOutput) -> Tensor:
        ids_TK, capacity = out.ids_TK, self.gate.capacity(x_TD.shape[0])
        if capacity is not None:
            ids_TK = ops.limit_by_capacity(
                ids_TK, self.num_experts, capacity, self.gate.config.drop_policy, out.weights_TK
            )
        self._record(out, ids_TK)
        plan = ops.make_plan(ids_TK, self.num_experts, may_drop=capacity is not None or self.gate.may_give_up)
        rows_RD = ops.dispatch(x_TD, plan)
        rows_RD, tokens_per_expert_L, state = self.dispatcher.dispatch(rows_RD, plan.tokens_per_expert_E)
        rows_RO = self.experts(rows_RD, tokens_per_expert_L)
        rows_RO = self.dispatcher.combine(rows_RO, state)
        return ops.combine(rows_RO, plan, out.weights_TK.to(rows_RO.dtype))

    @torch.no_grad()
    def _record(self, out: GateOutput, kept_TK: Tensor) -> None:
        chosen_TK = out.ids_TK
        self.last_stats = MoEStats(
            tokens_per_expert_E=ops.histogram(chosen_TK, self.num_experts),
            num_dropped=(chosen_TK >= 0).sum() - (kept_TK >= 0).sum(),
            losses={name: loss.detach() for name, (_, loss) in out.losses.items()},
            entropy=losses.entropy(out.probs_TE.detach()),
        )
