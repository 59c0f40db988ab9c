"""Balance of one MoE layer while it runs: which experts are shadowed in this step, and which stand where.

A decision is a pure function of the counts, which all ranks share, and of what was chosen in the optimizer step before:
micro-batches of a step, evaluation and the forward pass that activation checkpointing runs anew change nothing, so the
latter decides as the first one did.

Legend: R rows, D model, E experts of the layer in all, L experts on this rank, S shadowed experts, W ep ranks, P etp
ranks.  Experts are told apart by their place here: place w * L + l is the l-th expert of ep rank w.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeflow.moe import Experts
from moeflow.moe.gates.base import in_backward
from moeflow.moe.tree import Tree, leaves, tree_map, unflatten
from moeflow.parallel import collectives
from moeflow.parallel.dispatcher import Merge, RankDispatcher, Way, merged, unmerged
from moeflow.parallel.shadow import Message, bring, numbers_of, run_shadows
from moeflow.plan.cost import ExpertShape, Grouping
from moeflow.plan.layer_cost import EXCHANGES, layer_time, work_of
from moeflow.plan.placement import MoveDecision, decide_move, smooth
from moeflow.plan.profile import DTYPE_BYTES, Profile
from moeflow.plan.shadow import choose_shadows, row_costs
from moeflow.schema import BalanceConfig

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Done:
    """What the layer did in its last forward pass of training.

    Attributes:
        counts_WE: rows that each ep rank (with its etp ranks) had for each place.
        shadows: places that were shadowed.
    """

    counts_WE: Ints
    shadows: tuple[int, ...]


class Balancer:
    """Balance of one layer over its ep group.

    Args:
        config: what was asked for.
        profile: coefficients, the same on all ranks.
        shape: of one expert, as a rank holds it.
        grouping: where the ranks of the ep group stand.
        num_experts: E.

    Attributes:
        order_E: expert at each place; ascending without a placement.
        previous: places that were shadowed in the step before.
        history_E: smoothed rows of each expert in one forward pass, over the ranks of the group; None at the start.
        done: the last forward pass of training; None before the first.
        moved: experts that changed their rank since this was last asked.
    """

    def __init__(
        self, config: BalanceConfig, profile: Profile, shape: ExpertShape, grouping: Grouping, num_experts: int
    ):
        self.config, self.profile, self.shape, self.grouping = config, profile, shape, grouping
        self.costs = row_costs(profile, shape, grouping, num_experts)
        self.local = num_experts // grouping.ranks
        self.owner_E = np.repeat(np.arange(grouping.ranks), self.local)
        self.order_E: Ints = np.arange(num_experts)
        self.previous: tuple[int, ...] = ()
        self.history_E: NDArray[np.float64] | None = None
        self.done: Done | None = None
        self.moved = 0

    # --- a forward pass ----------------------------------------------------------------------------------------------

    def run(self, dispatcher: RankDispatcher, experts: Experts, rows_RD: Tree, tokens_per_expert_E: Tensor) -> Tree:
        """Rows, ordered by place, through the experts; outputs in the same order.  Collective."""
        dispatcher.begin(leaves(rows_RD)[0], tokens_per_expert_E)
        counts_WPE = _counts_of_all(dispatcher, tokens_per_expert_E)
        shadows = self.decide(counts_WPE.sum(1))
        if not shadows:
            return dispatcher.through(experts, rows_RD, _way(dispatcher, counts_WPE, tokens_per_expert_E))
        going_WPE = counts_WPE.copy()
        going_WPE[..., list(shadows)] = 0
        own_E = counts_WPE[dispatcher.ep.rank, dispatcher.etp.rank]
        runs = _runs(own_E, shadows)
        message = Message(dispatcher.ep, shadows, self.local, numbers_of(experts))
        parameters = bring(experts, message)
        going, staying = _parted(rows_RD, runs)
        gone = None
        if len(shadows) < len(own_E):
            gone = dispatcher.through(experts, going, _way(dispatcher, going_WPE, tokens_per_expert_E))
        merge = _merge(dispatcher, counts_WPE[dispatcher.ep.rank][:, list(shadows)], tokens_per_expert_E)
        counts_S = merge.merged_WL.sum(0) if merge else _like(own_E[list(shadows)], tokens_per_expert_E)
        stayed = run_shadows(
            experts, parameters, tree_map(lambda leaf: merged(leaf, merge, dispatcher.etp), staying), counts_S
        )
        stayed = tree_map(lambda leaf: unmerged(leaf, merge, dispatcher.etp), stayed)
        return _joined(gone, stayed, runs)

    def decide(self, counts_WE: Ints) -> tuple[int, ...]:
        """Places to shadow; the same on all ranks of the group."""
        shadows: tuple[int, ...] = ()
        if self.config.shadow and self.config.fixed_shadows is not None:
            shadows = tuple(np.flatnonzero(np.isin(self.order_E, self.config.fixed_shadows)).tolist())
        elif self.config.shadow:
            found = choose_shadows(counts_WE, self.owner_E, self.costs, self.previous, self.config.margin)
            shadows = found.experts
        if torch.is_grad_enabled() and not in_backward():
            self.done = Done(counts_WE, shadows)
        return shadows

    # --- between steps -----------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Take what the last forward pass of the optimizer step did as the past of the next one."""
        if self.done is None:
            return
        self.previous = self.done.shadows
        load_E = np.zeros(len(self.order_E))
        load_E[self.order_E] = self.done.counts_WE.sum(0)
        self.history_E = smooth(self.history_E, load_E, self.config.decay)

    def decide_move(self, load_E: NDArray[np.float64], steps: int) -> MoveDecision:
        """Whether experts change their rank.

        Args:
            load_E: forecast rows of each expert, over the ranks of one group.
            steps: forward passes until the next decision.
        """
        owner_E = np.empty_like(self.owner_E)
        owner_E[self.order_E] = self.owner_E
        return decide_move(load_E, owner_E, self.profile, self.shape, self.grouping, steps, self.config.move_margin)

    def reorder(self, order_E: Ints) -> None:
        """Experts stand in another order from now on."""
        shadowed = self.order_E[list(self.previous)]
        self.moved += int((self._ranks_of(order_E) != self._ranks_of(self.order_E)).sum())
        self.order_E = np.asarray(order_E, dtype=np.int64)
        self.previous = tuple(np.flatnonzero(np.isin(self.order_E, shadowed)).tolist())

    def _ranks_of(self, order_E: Ints) -> Ints:
        ranks = np.empty_like(self.owner_E)
        ranks[order_E] = self.owner_E
        return ranks

    # --- told --------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Of the last forward pass of training, on this rank's group; `moved` starts anew."""
        assert self.done is not None, "asked after a step"
        counts_WE, shadows = self.done.counts_WE, self.done.shadows
        before, after = work_of(counts_WE, self.owner_E), work_of(counts_WE, self.owner_E, shadows)
        rows = after.moves.sum() - np.trace(after.moves)
        ranks = self.grouping.ranks
        # Both ways of a message carry (R-1)/R of it over each rank's link, twice.
        parameters = 4 * (ranks - 1) / ranks * len(shadows) * self.shape.parameters * DTYPE_BYTES[self.shape.dtype]
        moved, self.moved = self.moved, 0
        return {
            "imbalance_before": before.imbalance,
            "imbalance": after.imbalance,
            "shadowed": float(len(shadows)),
            "migrations": float(moved),
            "bytes_sent": float(EXCHANGES * rows * self.shape.row_bytes / ranks + parameters),
            "predicted_s": layer_time(self.profile, self.shape, self.grouping, after, len(shadows)).total_s,
        }

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON."""
        return {
            "order": self.order_E.tolist(),
            "shadowed": self.order_E[list(self.previous)].tolist(),
            "history": None if self.history_E is None else self.history_E.tolist(),
            "moved": self.moved,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take it back, after the experts stand in its order."""
        self.previous = tuple(np.flatnonzero(np.isin(self.order_E, state["shadowed"])).tolist())
        self.history_E = None if state["history"] is None else np.array(state["history"], dtype=np.float64)
        self.moved = state["moved"]


def _counts_of_all(dispatcher: RankDispatcher, tokens_per_expert_E: Tensor) -> Ints:
    """[W, P, E] rows that each rank has for each place."""
    counts_PE = torch.stack(collectives.all_gather(tokens_per_expert_E, dispatcher.etp))
    return torch.stack(collectives.all_gather(counts_PE, dispatcher.ep)).cpu().numpy()


def _like(values: Ints, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)


def _way(dispatcher: RankDispatcher, counts_WPE: Ints, like: Tensor) -> Way:
    """How many rows go where, without asking."""
    ep, etp = dispatcher.ep, dispatcher.etp
    local = counts_WPE.shape[-1] // ep.size
    mine = slice(ep.rank * local, (ep.rank + 1) * local)
    sent_WL, arrived_WL = counts_WPE[ep.rank, etp.rank].reshape(ep.size, local), counts_WPE[:, etp.rank, mine]
    merged_PL = counts_WPE[..., mine].sum(0)
    counts_L = merged_PL.sum(0) if etp.size > 1 else arrived_WL.sum(0)
    merge = _merge(dispatcher, merged_PL, like)
    return Way(sent_WL.tolist(), arrived_WL.tolist(), _like(arrived_WL, like), _like(counts_L, like), merge)


def _merge(dispatcher: RankDispatcher, merged_PL: Ints, like: Tensor) -> Merge | None:
    return Merge(merged_PL.sum(1).tolist(), _like(merged_PL, like)) if dispatcher.etp.size > 1 else None


def _runs(counts_E: Ints, shadows: tuple[int, ...]) -> list[tuple[bool, int]]:
    """(whether they stay, how many) of consecutive rows, ordered by place."""
    staying = np.zeros(len(counts_E), dtype=bool)
    staying[list(shadows)] = True
    found = groupby(zip(staying.tolist(), counts_E.tolist(), strict=True), key=lambda pair: pair[0])
    return [(stays, sum(count for _, count in group)) for stays, group in found]


def _parted(rows_RD: Tree, runs: list[tuple[bool, int]]) -> tuple[Tree, Tree]:
    """Rows that go, and rows that stay."""
    sizes = [count for _, count in runs]

    def part(leaf: Tensor, wanted: bool) -> Tensor:
        pieces = [piece for piece, (stays, _) in zip(leaf.split(sizes), runs, strict=True) if stays is wanted]
        return torch.cat(pieces) if pieces else leaf[:0]

    return tree_map(lambda leaf: part(leaf, False), rows_RD), tree_map(lambda leaf: part(leaf, True), rows_RD)


def _joined(gone: Tree | None, stayed: Tree, runs: list[tuple[bool, int]]) -> Tree:
    """Outputs in the order that the rows had before they parted."""
    if gone is None:
        return stayed

    def join(out: Tensor, here: Tensor) -> Tensor:
        there = iter(out.split([count for stays, count in runs if not stays]))
        own = iter(here.split([count for stays, count in runs if stays]))
        return torch.cat([next(own if stays else there) for stays, _ in runs])

    return unflatten(stayed, (join(*pair) for pair in zip(leaves(gone), leaves(stayed), strict=True)))
