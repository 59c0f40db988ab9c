"""FastMoE's MoE layer.

Legend: N tokens, d width, k top-k, E experts on this worker, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moeflow import ops
from moeflow.compat.fmoe.gates import NaiveGate
from moeflow.errors import ConfigError
from moeflow.moe.dispatcher import Dispatcher, LocalDispatcher
from moeflow.moe.tree import Tree, leaves, tree_map, unflatten
from moeflow.parallel.dispatcher import RankDispatcher
from moeflow.parallel.topology import Group, Topology, group_of
from moeflow.schema.layout import Layout


def mark_module_parallel_comm(module: nn.Module, comm: str) -> None:
    """Name the group that `DistributedGroupedDataParallel` reduces the module's gradients over."""
    for parameter in module.parameters():
        parameter.dp_comm = comm  # type: ignore[attr-defined]


class FMoE(nn.Module):
    """FastMoE's general MoE layer: any module as expert, any gate.

    With masked tokens it differs from FastMoE in that the mask follows the tokens when `slice_group` shares them out,
    and that a masked token's output is the value of `mask_dict` whatever the scores sum to.  Tokens that do not divide
    over `slice_group` are not lost.

    Args:
        num_expert: E, experts on this worker.
        d_model: d.
        world_size: workers that the experts are spread over; there are `num_expert * world_size` experts in all.
        mp_group: older name of `slice_group`.
        slice_group: process group of the workers that hold the same tokens; each takes its share of them.
        moe_group: process group that the experts are spread over; None is the world.
        top_k: k.
        gate: class or function of (d_model, num_expert, world_size, top_k).
        expert: class or function of d_model, called for each expert; a list of such for different experts; None where a
            subclass sets `self.experts` to a module that is called once as (rows, counts [E]).
        gate_hook: called as (ids [N, k], scores [N, k], None) in each forward pass.
        mask: integer [N]; tokens whose mask is not 0 skip the experts.
        mask_dict: output [d] of masked tokens by mask value.
        gate_bias: whether the linear layer of the gate has a bias.
    """

    def __init__(
        self,
        num_expert: int = 32,
        d_model: int = 1024,
        world_size: int = 1,
        mp_group: Any = None,
        slice_group: Any = None,
        moe_group: Any = None,
        top_k: int = 2,
        gate: Callable[..., nn.Module] = NaiveGate,
        expert: Callable[[int], nn.Module] | Sequence[Callable[[int], nn.Module]] | None = None,
        gate_hook: Callable[[Tensor, Tensor, None], Any] | None = None,
        mask: Tensor | None = None,
        mask_dict: Mapping[int, Tensor] | None = None,
        gate_bias: bool = True,
    ):
        super().__init__()
        self.d_model, self.world_size, self.top_k = d_model, world_size, top_k
        self.slice_group = slice_group if slice_group is not None else mp_group
        self.moe_group = moe_group
        self.experts: Any = None
        if expert is None:
            self.experts_fused = True
        else:
            factories = [expert] * num_expert if callable(expert) else list(expert)
            num_expert = len(factories)
            self.experts = nn.ModuleList([factory(d_model) for factory in factories])
            self.experts_fused = False
        self.num_expert = num_expert
        bias = {"gate_bias": gate_bias} if isinstance(gate, type) and issubclass(gate, NaiveGate) else {}
        self.gate = gate(d_model, num_expert, world_size, top_k, **bias)
        self.gate_hook, self.mask, self.mask_dict = gate_hook, mask, mask_dict
        self._dispatcher: Dispatcher | None = None

    def expert_fn(self, inp: Tree, fwd_expert_count: Tensor) -> Tree:
        """Run this worker's experts on rows ordered by expert; `fwd_expert_count` [E] rows each."""
        if self.experts_fused:
            return self.experts(inp, fwd_expert_count)
        counts = fwd_expert_count.cpu()
        pieces = list(zip(*(leaf.split(counts.tolist()) for leaf in leaves(inp)), strict=True))
        # An expert without rows is called too: its gradient is zero then, and not missing.
        outs = [
            expert(unflatten(inp, piece), counts[number : number + 1])
            for number, (expert, piece) in enumerate(zip(self.experts, pieces, strict=True))
        ]
        return tree_map(lambda *parts: torch.cat(parts), *outs)

    def mark_parallel_comm(self, expert_dp_comm: str = "none") -> None:
        """Name the groups that gradients are reduced over: `expert_dp_comm` for experts, "gate" for the gate."""
        if self.experts is not None:
            mark_module_parallel_comm(self.experts, expert_dp_comm)
        mark_module_parallel_comm(self.gate, "gate")

    def ensure_comm(self) -> Dispatcher:
        """The dispatcher of this layer; made at the first forward pass, when the process group is there."""
        if self._dispatcher is None:
            self._dispatcher = self._make_dispatcher()
        return self._dispatcher

    def _make_dispatcher(self) -> Dispatcher:
        alone = Group("etp", (0,), 0)
        ep = group_of(self.moe_group, "moe") if self.world_size > 1 else alone
        if ep.size != self.world_size:
            raise ConfigError(
                f"world_size={self.world_size}: the group that the experts are spread over has {ep.size} workers",
                f"world_size={ep.size}, or another moe_group",
            )
        tp = group_of(self.slice_group, "slice") if self.slice_group is not None else alone
        if max(ep.size, tp.size) == 1:
            return LocalDispatcher()
        return RankDispatcher(Topology(Layout(1), 0, {"ep": ep, "etp": alone, "tp": tp}))

    def forward(self, moe_inp: Tree) -> Tree:
        """Map tokens [N, d], or a dict or list of such, to the experts' combined outputs."""
        dispatcher = self.ensure_comm()
        num_tokens = leaves(moe_inp)[0].shape[0]
        inp = tree_map(lambda leaf: dispatcher.split_tokens(leaf)[0], moe_inp)
        ids, scores = self.gate(leaves(inp)[0])[:2]
        ids, scores = ids.reshape(-1, self.top_k), scores.reshape(-1, self.top_k)
        if self.gate_hook is not None:
            self.gate_hook(ids, scores, None)
        mask = None if self.mask is None else self._mask(dispatcher, num_tokens, ids.device)
        if mask is not None:
            ids = ids.masked_fill((mask != 0)[:, None], -1)
        plan = ops.make_plan(ids, self.num_expert * self.world_size, True)
        sent = [dispatcher.dispatch(ops.dispatch(leaf, plan), plan.tokens_per_expert_E) for leaf in leaves(inp)]
        arrived = iter([rows for rows, _, _ in sent])
        _, counts, way = sent[0]
        out = self.expert_fn(tree_map(lambda _: next(arrived), inp), counts)
        combined = tree_map(lambda leaf: ops.combine(dispatcher.combine(leaf, way), plan, scores), out)
        if mask is not None:
            combined = tree_map(lambda leaf: self._fill_masked(leaf, mask), combined)
        return tree_map(lambda leaf: dispatcher.merge_tokens(leaf, num_tokens), combined)

    def _mask(self, dispatcher: Dispatcher, num_tokens: int, device: torch.device) -> Tensor:
        assert self.mask is not None
        mask = self.mask.to(device).reshape(-1)
        if mask.numel() != num_tokens:
            raise ConfigError(f"mask has {mask.numel()} entries for {num_tokens} tokens", "a mask of one entry a token")
        return dispatcher.split_tokens(mask[:, None])[0].reshape(-1)

    def _fill_masked(self, out: Tensor, mask: Tensor) -> Tensor:
        for value, row in (self.mask_dict or {}).items():
            out = torch.where((mask == value)[:, None], torch.as_tensor(row, dtype=out.dtype, device=out.device), out)
        return out
