"""Seconds of the parts of one MoE layer: matrix products of the experts, exchange of tokens, broadcast and reduction.

Pure functions of counts, a placement and a profile.  Formulas and sources: docs/balance.md.  Sizes that come as arrays
may have any number of leading dimensions (groups, layers, steps); the last ones are named in each docstring.

Legend: R ranks of the expert-parallel group, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeflow.plan.profile import DTYPE_BYTES, Link, Profile

Floats = NDArray[np.float64]

#: Backward computes two matrix products for each of the forward: one for the input's gradient, one for the weight's.
BACKWARD = 2


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes of one expert.

    Attributes:
        d_model: width of a row.
        d_hidden: hidden width (of this rank's slice where etp cuts it).
        gated: SwiGLU and its like have three matrices, plain MLPs two.
        dtype: of the rows and of the products.
        param_bytes: bytes of one parameter as it is broadcast.
        grad_bytes: bytes of one gradient as it is reduced.
    """

    d_model: int
    d_hidden: int
    gated: bool = False
    dtype: str = "fp32"
    param_bytes: int = 4
    grad_bytes: int = 4

    @property
    def parameters(self) -> int:
        """Matrix entries of one expert; biases are too few to count."""
        return (3 if self.gated else 2) * self.d_model * self.d_hidden

    @property
    def row_flops(self) -> int:
        """FLOPs of one row forward; a multiply-add is two."""
        return 2 * self.parameters

    @property
    def row_bytes(self) -> int:
        """Bytes of one row that is sent."""
        return self.d_model * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Where the ranks of one expert-parallel group stand.

    Attributes:
        ranks: R.
        per_node: ranks of the group on each node; they are consecutive.
    """

    ranks: int
    per_node: int

    def __post_init__(self) -> None:
        assert 1 <= self.per_node <= self.ranks, "a node holds at least one rank of the group and at most all"

    @property
    def nodes(self) -> int:
        """Nodes the group touches."""
        return -(-self.ranks // self.per_node)

    def node_of(self) -> NDArray[np.int64]:
        """[R] node of each rank."""
        return np.arange(self.ranks) // self.per_node


def products_s(profile: Profile, shape: ExpertShape, rows: Floats | float, backward: bool = True) -> Floats:
    """Seconds of the matrix products of experts with so many rows each.

    rows * FLOPs / rate, or the time to read the weights where that is longer, plus half_rows at the rate: a product of
    few rows does not fill the device (t = (n + n_half) / rate, Hockney's n_1/2), plus a launch a product.  0 rows cost
    nothing.

    Args:
        profile: coefficients.
        shape: of one expert.
        rows: [...] of each expert; sum over a rank's experts afterwards.
        backward: whether to count the backward pass too.

    Returns:
        [...] seconds.
    """
    n = np.asarray(rows, dtype=np.float64)
    passes = 1 + (BACKWARD if backward else 0)
    products = passes * (3 if shape.gated else 2)
    math_s = (n + profile.half_rows) * shape.row_flops / profile.rate(shape.dtype)
    weights_s = shape.parameters * DTYPE_BYTES[shape.dtype] / profile.memory_bytes_per_s
    return np.where(n > 0, passes * np.maximum(math_s, weights_s) + products * profile.launch_s, 0.0)


def permute_s(profile: Profile, shape: ExpertShape, rows: Floats | int) -> Floats:
    """Seconds to order rows by expert and back, forward and backward."""
    return np.asarray(rows, dtype=np.float64) * shape.row_bytes * profile.row_passes / profile.memory_bytes_per_s


def exchange_s(
    profile: Profile,
    grouping: Grouping,
    inside_bytes: Floats,
    between_bytes: Floats,
    hierarchical: bool = False,
) -> Floats:
    """Seconds of one all-to-all.

    Flat: a message to each peer, the busiest rank's bytes over its link; inside and between nodes run side by side.
    Hierarchical (Tutel, arXiv:2206.03382, section 3.4; Megatron's and DeepEP's two hops): first inside the node to the
    rank with the receiver's place, then between nodes, one message a node; what crosses nodes passes the inside link
    as well.

    Args:
        profile: coefficients.
        grouping: places of the ranks.
        inside_bytes: [..., R] larger of sent and received bytes of each rank, with ranks of its own node.
        between_bytes: [..., R] the same with ranks of other nodes.
        hierarchical: two hops.

    Returns:
        [...] seconds.
    """
    inside, between = profile.inside, profile.between
    peers_inside, peers_between = grouping.per_node - 1, grouping.ranks - grouping.per_node
    busiest = np.asarray(inside_bytes, dtype=np.float64).max(-1)
    crossing = _node_totals(between_bytes, grouping) if profile.shared_nic else np.asarray(between_bytes, np.float64)
    across = crossing.max(-1) / between.bytes_per_s
    if not hierarchical:
        first = busiest / inside.bytes_per_s + _messages_s(inside, peers_inside)
        return np.maximum(first, across + _messages_s(between, peers_between))
    if grouping.nodes == 1:
        return busiest / inside.bytes_per_s + _messages_s(inside, peers_inside)
    place = grouping.per_node
    staged = np.asarray(inside_bytes + between_bytes * (place - 1) / place, dtype=np.float64).max(-1)
    first = staged / inside.bytes_per_s + _messages_s(inside, peers_inside)
    return first + across + _messages_s(between, grouping.nodes - 1)


def even_exchange_s(
    profile: Profile, grouping: Grouping, num_bytes: float, imbalance: float = 1.0, hierarchical: bool = False
) -> float:
    """Seconds of one all-to-all whose ranks each have `num_bytes` for all ranks alike: `exchange_s` without arrays.

    Args:
        profile: coefficients.
        grouping: places of the ranks.
        num_bytes: of each rank, what stays at home included.
        imbalance: bytes of the busiest receiver over the mean.
        hierarchical: two hops.
    """
    ranks, place = grouping.ranks, grouping.per_node
    if ranks == 1:
        return 0.0
    each = num_bytes * imbalance / ranks
    near, far = each * (place - 1), each * (ranks - place)
    inside, between = profile.inside, profile.between
    # A shared link carries its node's mean, which is close to the mean of all.
    crossing = far / imbalance * place if profile.shared_nic else far
    across = crossing / between.bytes_per_s
    flat = near / inside.bytes_per_s + _messages_s(inside, place - 1)
    if grouping.nodes == 1:
        return flat
    if not hierarchical:
        return max(flat, across + _messages_s(between, ranks - place))
    staged = (near + far * (place - 1) / place) / inside.bytes_per_s + _messages_s(inside, place - 1)
    return staged + across + _messages_s(between, grouping.nodes - 1)


def _messages_s(link: Link, peers: int) -> float:
    """Latency of `peers` messages: the first in full, each next one a tenth, since they are posted together."""
    return link.latency_s * (1 + 0.1 * (peers - 1)) if peers else 0.0


def _node_totals(per_rank: Floats, grouping: Grouping) -> Floats:
    values = np.asarray(per_rank, dtype=np.float64)
    return np.add.reduceat(values, np.arange(0, grouping.ranks, grouping.per_node), axis=-1)


def group_link(profile: Profile, ranks: int, per_node: int) -> Link:
    """The slowest link that a collective over a group crosses."""
    return profile.inside if ranks <= per_node else profile.between


def broadcast_s(profile: Profile, link: Link, ranks: int, num_bytes: float) -> float:
    """Seconds to bring `num_bytes` from one rank to all of a group; a reduction to one rank costs the same.

    bytes / bandwidth once where data flow through the tree in pieces, whatever the number of receivers; with
    tree_growth 1 once for each of the ceil(log2 R) levels.
    """
    if ranks == 1:
        return 0.0
    levels = math.ceil(math.log2(ranks))
    return levels * link.latency_s + num_bytes / link.bytes_per_s * (1 + profile.tree_growth * (levels - 1))


def all_reduce_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Seconds of an all-reduce: 2 (R-1)/R bytes over each link (ring), 2 ceil(log2 R) latencies (tree)."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * num_bytes / link.bytes_per_s + 2 * math.ceil(math.log2(ranks)) * link.latency_s


def all_gather_s(link: Link, ranks: int, num_bytes: float) -> float:
    """Seconds of an all-gather, or a reduce-scatter, whose whole result (input) has `num_bytes`."""
    return all_reduce_s(link, ranks, num_bytes) / 2


def traffic(moves: NDArray, grouping: Grouping, row_bytes: float) -> tuple[Floats, Floats]:
    """Bytes that the ranks exchange, as `exchange_s` takes them.

    Args:
        moves: [..., R, R] rows that a rank (last but one) has for a rank (last).  Rows for oneself are not sent.
        grouping: places.
        row_bytes: of one row.

    Returns:
        (inside, between), each [..., R]: the larger of sent and received bytes of each rank.
    """
    rows = np.asarray(moves, dtype=np.float64)
    node = grouping.node_of()
    same = node[:, None] == node[None, :]
    near = rows * (same & ~np.eye(grouping.ranks, dtype=bool))
    far = rows * ~same
    inside, between = (np.maximum(m.sum(-1), m.sum(-2)) * row_bytes for m in (near, far))
    return inside, between
