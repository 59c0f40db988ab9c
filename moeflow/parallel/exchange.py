"""Which way the rows of an MoE layer take: in chunks under computation, in two hops, or plainly.

Decided once for each layer, at its first exchange, from the size of that exchange and the cost model; the same on every
rank, since one rank decides for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moeflow.errors import ConfigError
from moeflow.logging import get_logger
from moeflow.moe import Experts, MLPExperts
from moeflow.ops import activation
from moeflow.parallel import collectives
from moeflow.parallel.dispatcher import RankDispatcher, Way
from moeflow.parallel.nodes import grouping_of, own_node
from moeflow.parallel.overlap import cut, run_chunked
from moeflow.parallel.parallelize import moe_layers
from moeflow.parallel.topology import Group, Topology
from moeflow.parallel.two_hop import TwoHop
from moeflow.plan.cost import ExpertShape, even_exchange_s, products_s
from moeflow.plan.overlap import choose_chunks
from moeflow.plan.profile import Profile
from moeflow.schema.balance import OverlapConfig

logger = get_logger(__name__)

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Choice:
    """Of one layer.

    Attributes:
        chunks: 1 is the whole exchange at once.
        hierarchical: whether it takes two hops.
        plain_s: predicted seconds of exchange and experts in the forward pass, without either.
        chosen_s: the same with this choice.
    """

    chunks: int
    hierarchical: bool
    plain_s: float
    chosen_s: float


class Exchanger:
    """The way of one layer's rows.

    Args:
        config: what was asked for.
        profile: coefficients of the cost model, the same on all ranks.
        names: node of each rank of the ep group.
        two_hop: groups for two hops; None where they are not to be had.
    """

    def __init__(self, config: OverlapConfig, profile: Profile, names: list[str], two_hop: TwoHop | None):
        self.config, self.profile, self.two_hop = config, profile, two_hop
        self.grouping = grouping_of(names)
        self.choice: Choice | None = None

    def choose(self, experts: Experts, rows_RD: Tensor, ep: Group, etp: Group, shared: bool = False) -> Choice:
        """Decide at the first call, for all ranks alike; collective then.

        Args:
            experts: of this rank.
            rows_RD: that go to the experts.
            ep: the ranks.
            etp: ranks that share each expert.
            shared: whether the plain exchange goes through shared memory: nothing travels that could be hidden.
        """
        if self.choice is None:
            most = max(collectives.gather_objects(rows_RD.shape[0], ep))
            own = self._decided(experts, rows_RD, most, etp.size, shared) if ep.rank == 0 else None
            choice = collectives.broadcast_object(own, ep)
            assert choice is not None
            self.choice = choice
        return self.choice

    def _decided(self, experts: Experts, rows_RD: Tensor, num_rows: int, etp: int, shared: bool) -> Choice:
        shape = expert_shape(experts, rows_RD.shape[1], rows_RD.dtype, etp)
        num_bytes = num_rows * rows_RD.element_size() * rows_RD.shape[1]
        flat, hops = (even_exchange_s(self.profile, self.grouping, num_bytes, 1.0, two) for two in (False, True))
        asked = self.config.exchange
        two = asked == "hierarchical" or (asked == "auto" and self.two_hop is not None and hops < flat)
        # Each expert is computed once, whatever the number of chunks: no part of it is paid again.
        local = experts.num_local
        compute = local * float(products_s(self.profile, shape, num_rows / local, backward=False))
        plain = 2 * flat + compute
        chunks, chosen = 1, 2 * (hops if two else flat) + compute
        if self.config.chunks == "auto":
            if experts.stacked and asked != "hierarchical" and not shared:
                found = choose_chunks(
                    self.profile,
                    flat,
                    compute,
                    max_chunks=local,
                    latency_s=even_exchange_s(self.profile, self.grouping, 0),
                )
                if found.chunks > 1 and found.chunked_s < chosen:
                    chunks, chosen, two = found.chunks, found.chunked_s, False
        else:
            chunks = min(int(self.config.chunks), local)
        logger.debug("exchange: %d chunks, %s hops", chunks, "two" if two else "no")
        return Choice(chunks, two, plain, chosen)

    def through(self, dispatcher: RankDispatcher, experts: Experts, rows_RD: Tensor, way: Way) -> Tensor | None:
        """Rows in chunks to their experts, through them, and back; None where the exchange is not cut."""
        choice = self.choose(experts, rows_RD, dispatcher.ep, dispatcher.etp, dispatcher.shares_memory)
        if choice.chunks == 1:
            return None

        def compute(rows: Tensor, chunk: tuple[int, int], of_chunk: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
            return dispatcher.compute(rows, way, chunk, of_chunk)

        return run_chunked(
            experts, rows_RD, way.sent, way.arrived, cut(experts.num_local, choice.chunks), dispatcher.ep, compute
        )


def expert_shape(experts: Experts, width: int, row_dtype: torch.dtype, etp: int) -> ExpertShape:
    """Sizes of one expert for the cost model; of other classes than MLPs, those of an MLP with as many parameters."""
    dtype = _DTYPES.get(row_dtype, "fp32")
    if isinstance(experts, MLPExperts):
        hidden, gated = max(1, experts.d_hidden // etp), activation.is_gated(experts.activation)
        return ExpertShape(experts.d_model, hidden, gated, dtype)
    numbers = sum(parameter.numel() for parameter in experts.parameters()) // max(experts.num_local, 1)
    return ExpertShape(width, max(1, numbers // (2 * width)), False, dtype)


def set_exchange(
    model: nn.Module, topology: Topology, config: OverlapConfig, profile: Profile, timeout_s: float
) -> None:
    """Give every MoE layer of this rank's part its way; every rank calls it.

    Raises:
        ConfigError: what was asked for cannot be had on this layout, or with these experts.
    """
    ep = topology["ep"]
    if not config.active or ep.size == 1:
        return
    names = collectives.gather_objects(own_node(), ep)
    two_hop = TwoHop.over(ep, names, timeout_s) if config.exchange != "flat" else None
    if config.exchange == "hierarchical" and two_hop is None:
        raise ConfigError(
            f"overlap.exchange=hierarchical needs several nodes with several ranks of an ep group on each, in order; "
            f"its ranks are on {names}",
            "overlap.exchange=auto",
        )
    for name, layer in moe_layers(model).items():
        if config.chunks not in ("1", "auto") and not layer.experts.stacked:
            raise ConfigError(
                f"overlap.chunks={config.chunks}: the experts of {name} are modules of their own and cannot be cut "
                "into chunks",
                "overlap.chunks=1, or overlap.chunks=auto",
            )
        assert isinstance(layer.dispatcher, RankDispatcher), "ep > 1"
        layer.dispatcher.exchanger = Exchanger(config, profile, names, two_hop)
