"""The MoE layer: the token path from top to bottom.

Legend: T tokens, D model, E experts, K top-k, R rows (dispatched choices), O output width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from moeflow import ops
from moeflow.errors import ConfigError
from moeflow.moe import losses
from moeflow.moe.aux_loss import attach_loss
from moeflow.moe.dispatcher import Dispatcher, LocalDispatcher
from moeflow.moe.experts import Experts, MLPExperts
from moeflow.moe.gates import Gate, GateOutput, SoftOutput, TokenContext, build_gate
from moeflow.moe.module_experts import Factory, experts_from
from moeflow.moe.stats import MoEStats
from moeflow.moe.tree import Tree, leaves, tree_map
from moeflow.ops.phases import phase
from moeflow.schema.gate import GateConfig

GateHook = Callable[[GateOutput], GateOutput | None]


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
        experts: instead of stacked MLPs an `Experts` module, a function from d_model to a module (called for each
            expert), or a list of such functions, one for each expert.
        init_std: standard deviation of the MLPs' initial values; None draws as nn.Linear does.
        out_init_std: the same for their second layer.
        shared: maps (tokens [T, D], output of the routed experts [T, O]) to the output [T, O]: `SharedExperts`,
            `ResidualExperts` or a module of your own.
        mask_values: value of the output, [O] or a number, for each mask value; masked tokens of other values are zero.
        gate_hook: called with what the gate decided, before anything is dropped; what it returns, if anything, is used
            instead.

    Attributes:
        last_stats: `MoEStats` of the last forward pass; None before the first.
        aux_loss_scale: what the main loss is multiplied by before backward; the trainer sets it.
        places_E: int64 [E + 1], where experts stand among all ranks' if not in the order of their numbers; last -1.

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
        experts: Experts | Factory | Sequence[Factory] | None = None,
        init_std: float | None = None,
        out_init_std: float | None = None,
        shared: nn.Module | None = None,
        mask_values: Mapping[int, Tensor | float] | None = None,
        gate_hook: GateHook | None = None,
    ):
        super().__init__()
        if num_experts < 1:
            raise ConfigError(f"num_experts={num_experts}: an MoE layer needs at least one expert", "num_experts=8")
        self.d_model, self.num_experts = d_model, num_experts
        self.gate = gate if isinstance(gate, Gate) else build_gate(gate, d_model, num_experts)
        if experts is None:
            d_hidden = 4 * d_model if d_hidden is None else d_hidden
            experts = MLPExperts(num_experts, d_model, d_hidden, d_out, activation, bias, init_std, out_init_std)
        elif not isinstance(experts, Experts):
            experts = experts_from(experts, num_experts, d_model, d_model if d_out is None else d_out)
        self.experts: Experts = experts
        self.shared = shared
        self.mask_values = dict(mask_values or {})
        self.gate_hook = gate_hook
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.aux_loss_scale = 1.0
        self.last_stats: MoEStats | None = None
        self.places_E: Tensor | None = None

    def forward(self, x: Tree, token_ids: Tensor | None = None, mask: Tensor | None = None) -> Tree:
        """Route tokens through their experts.

        Args:
            x: [..., D]; all leading dimensions are tokens, and all but the first of them make one sequence.  A dict,
                list or tuple of such tensors, with the same tokens, goes to the experts whole; the gate sees the first.
            token_ids: int64 [...], ids of the tokens in a vocabulary; only the hash gate needs them.
            mask: integer or bool [...]: a token whose mask is not 0 skips the experts, counts in no loss, and has the
                output `mask_values` says.

        Returns:
            [..., O], or what the experts return, combined.

        Raises:
            ConfigError: the last dimension is not d_model.
        """
        first = leaves(x)[0]
        self._check(first)
        num_tokens = first.shape[:-1][-1:].numel()
        part, share = self.dispatcher.split_tokens(first)
        x = part if x is first else tree_map(self._split, x)
        lead = part.shape[:-1]
        token_ids_T, mask_T = self._split_labels(token_ids), self._split_labels(mask)
        context = TokenContext(
            math.prod(lead[1:]) if len(lead) > 1 else None, share, token_ids_T, None if mask_T is None else mask_T == 0
        )
        if self.dispatcher.token_ranks > 1 and self.gate.needs_whole_sequences(context):
            raise ConfigError(
                f"gate={self.gate.config.name} needs whole sequences, but {self.dispatcher.token_ranks} ranks share "
                "out the tokens of each",
                "parallel.tp=1",
            )
        x_TD = tree_map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), x)
        with phase("gate"):
            out = self.gate(leaves(x_TD)[0], context)
            if self.gate_hook is not None:
                out = self.gate_hook(out) or out
        y_TO = self._through_experts(x_TD, out, context)
        if self.shared is not None:
            with phase("shared experts"):
                y_TO = self.shared(x_TD, y_TO)
        if mask_T is not None:
            y_TO = tree_map(lambda leaf: self._fill_masked(leaf, mask_T), y_TO)
        if out.losses:
            y_TO = self._attach_losses(y_TO, out)
        return tree_map(
            lambda leaf: self.dispatcher.merge_tokens(leaf.reshape(*lead, leaf.shape[-1]), num_tokens), y_TO
        )

    # --- before the experts ------------------------------------------------------------------------------------------

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.d_model:
            raise ConfigError(
                f"input of shape {tuple(x.shape)}: the last dimension must be d_model={self.d_model}",
                f"build the layer with d_model={x.shape[-1]}",
            )

    def _split(self, x: Tensor) -> Tensor:
        return self.dispatcher.split_tokens(x)[0]

    def _split_labels(self, labels: Tensor | None) -> Tensor | None:
        """This rank's part of one integer for each token: [...] -> [T]."""
        return None if labels is None else self._split(labels.unsqueeze(-1)).reshape(-1)

    def _plan(self, ids_TK: Tensor, capacity: int | None, context: TokenContext) -> ops.DispatchPlan:
        if capacity is not None and self.gate.config.pad_to_capacity:
            return ops.make_padded_plan(ids_TK, self.num_experts, capacity)
        may_drop = (
            capacity is not None or self.gate.may_give_up or context.valid_T is not None or self.gate_hook is not None
        )
        return ops.make_plan(ids_TK, self.num_experts, may_drop)

    # --- experts -----------------------------------------------------------------------------------------------------

    def _through_experts(self, x_TD: Tree, out: GateOutput | SoftOutput, context: TokenContext) -> Tree:
        if isinstance(out, SoftOutput):
            return self._through_slots(x_TD, out)
        ids_TK, capacity = out.ids_TK, self.gate.capacity(out.ids_TK.shape[0])
        with phase("plan"):
            if capacity is not None and not self.gate.limits_itself:
                policy = self.gate.config.drop_policy
                ids_TK = ops.limit_by_capacity(ids_TK, self.num_experts, capacity, policy, out.weights_TK)
            self._record(out, ids_TK, context)
            places_TK = ids_TK if self.places_E is None else self.places_E[ids_TK].to(ids_TK.dtype)
            plan = self._plan(places_TK, capacity, context)
            weights_TK = self.gate.reweigh(out.weights_TK, ids_TK)
        with phase("dispatch"):
            rows_RD = tree_map(lambda leaf: ops.dispatch(leaf, plan), x_TD)
        with phase("all-to-all"):  # all of it but the experts themselves
            rows_RO = self.dispatcher.run(self.experts, rows_RD, plan.tokens_per_expert_E)
        with phase("combine"):
            return tree_map(lambda leaf: ops.combine(leaf, plan, weights_TK), rows_RO)

    def _through_slots(self, x_TD: Tree, out: SoftOutput) -> Tree:
        with phase("dispatch"):
            rows_RD = tree_map(out.rows, x_TD)
        per_expert = leaves(rows_RD)[0].shape[0] // self.num_experts
        device = out.dispatch_BSM.device
        counts_E = torch.full((self.num_experts,), per_expert, dtype=torch.int64, device=device)
        self.last_stats = MoEStats(counts_E, torch.zeros((), dtype=torch.int64, device=device))
        with phase("all-to-all"):
            rows_RO = self.dispatcher.run(self.experts, rows_RD, counts_E)
        with phase("combine"):
            return tree_map(out.merge, rows_RO)

    # --- after the experts -------------------------------------------------------------------------------------------

    def _fill_masked(self, y_TO: Tensor, mask_T: Tensor) -> Tensor:
        filled_TO = torch.where((mask_T != 0)[:, None], 0, y_TO)
        for key, value in self.mask_values.items():
            value = torch.as_tensor(value, dtype=y_TO.dtype, device=y_TO.device)
            filled_TO = torch.where((mask_T == key)[:, None], value, filled_TO)
        return filled_TO

    def _attach_losses(self, y_TO: Tree, out: GateOutput | SoftOutput) -> Tree:
        total = torch.stack([coefficient * loss for coefficient, loss in out.losses.values()]).sum()
        first = leaves(y_TO)[0]
        attached = attach_loss(first, total, self.aux_loss_scale / self.dispatcher.token_ranks)
        return tree_map(lambda leaf: attached if leaf is first else leaf, y_TO)

    def _counted(self, out: GateOutput) -> Tensor:
        # A hook may have changed the choices after they were counted.
        if out.counts_E is not None and self.gate_hook is None:
            return out.counts_E
        return ops.histogram(out.ids_TK, self.num_experts)

    @torch.no_grad()
    def _record(self, out: GateOutput, kept_TK: Tensor, context: TokenContext) -> None:
        chosen_TK, probs_TE = out.ids_TK, out.probs_TE
        self.last_stats = MoEStats(
            tokens_per_expert_E=self._counted(out),
            num_dropped=(chosen_TK >= 0).sum() - (kept_TK >= 0).sum(),
            losses={name: loss.detach() for name, (_, loss) in out.losses.items()},
            entropy=None if probs_TE is None else losses.entropy(probs_TE.detach(), context.valid_T),
        )
