"""Where the rows go between dispatch and the experts.

A layer is built with the local dispatcher: all experts are here, and nothing moves.  `moeflow.parallel` replaces it by
one that sends the rows to the ranks that hold their experts.  What the way back needs travels in the returned value, so
that a dispatcher keeps nothing between calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from moeflow.moe.tree import Tree, leaves, tree_map

if TYPE_CHECKING:
    from moeflow.moe.experts import Experts


class Dispatcher(Protocol):
    """Moves rows to their experts and back.

    Legend: T tokens, D model, R rows, E experts of the layer in all, L experts on this rank.
    """

    token_ranks: int  # ranks whose tokens together are those of one data-parallel rank

    def split_tokens(self, x: Tensor) -> tuple[Tensor, float]:
        """Take this rank's part, along the last but one dimension, of tokens [..., D] that several ranks hold alike.

        Returns:
            the part, and its size over the mean size of the parts.
        """
        ...

    def merge_tokens(self, y: Tensor, num_tokens: int) -> Tensor:
        """Undo `split_tokens` on the layer's output; `num_tokens` is the whole size of that dimension."""
        ...

    def dispatch(self, rows_RD: Tensor, tokens_per_expert_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Send rows, ordered by expert, to where their experts are.

        Returns:
            rows here, ordered by local expert; int64 [L] rows of each local expert; what `combine` needs.
        """
        ...

    def combine(self, rows_RD: Tensor, state: Any) -> Tensor:
        """Bring the experts' outputs back, in the order in which `dispatch` got the rows."""
        ...

    def run(self, experts: Experts, rows_RD: Tree, tokens_per_expert_E: Tensor) -> Tree:
        """Rows, ordered by expert, through the experts, wherever those are; outputs in the same order."""
        ...


def run_plain(dispatcher: Dispatcher, experts: Experts, rows_RD: Tree, tokens_per_expert_E: Tensor) -> Tree:
    """`Dispatcher.run` in three steps: all rows go, all are computed, all come back."""
    sent = [dispatcher.dispatch(leaf, tokens_per_expert_E) for leaf in leaves(rows_RD)]
    arrived = iter(rows for rows, _, _ in sent)
    _, tokens_per_expert_L, state = sent[0]
    rows_RO = experts(tree_map(lambda _: next(arrived), rows_RD), tokens_per_expert_L)
    return tree_map(lambda leaf: dispatcher.combine(leaf, state), rows_RO)


class LocalDispatcher:
    """All experts are in this process."""

    token_ranks = 1

    def split_tokens(self, x: Tensor) -> tuple[Tensor, float]:
        return x, 1.0

    def merge_tokens(self, y: Tensor, num_tokens: int) -> Tensor:
        return y

    def dispatch(self, rows_RD: Tensor, tokens_per_expert_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        return rows_RD, tokens_per_expert_E, None

    def combine(self, rows_RD: Tensor, state: Any) -> Tensor:
        return rows_RD

    def run(self, experts: Experts, rows_RD: Tree, tokens_per_expert_E: Tensor) -> Tree:
        return experts(rows_RD, tokens_per_expert_E)
