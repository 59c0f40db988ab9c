"""Coefficients of the cost model, measured on the layout at hand by all ranks together.

What is timed is what a run does: exchanges over the ep group (through shared memory where a run would use it), one
expert's products in both passes, permutations, an exchange under computation.  Every rank works at the same time, as in
a run, and the slowest one counts; the median of a few repetitions is taken.

Legend: R rows, D model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moeflow import ops
from moeflow.logging import get_logger
from moeflow.moe import MLPExperts
from moeflow.parallel import collectives
from moeflow.parallel.nodes import default_of, grouping_of, own_node
from moeflow.parallel.overlap import cut, run_chunked
from moeflow.parallel.shadow import Message, collect, spread
from moeflow.parallel.shared_memory import SharedRows
from moeflow.parallel.topology import Topology
from moeflow.plan.cost import ExpertShape, group_link
from moeflow.plan.fit import fit_link, fit_products, fit_tree_growth, line
from moeflow.plan.profile import Link, Profile

logger = get_logger(__name__)

REPEATS = 5
#: Bytes that a rank exchanges, until one exchange takes LONG_S.
SIZES = tuple(2**power for power in (14, 17, 19, 21, 23, 25))
LONG_S = 0.5
#: Most numbers of a shadowed expert that are sent.
SHADOW_NUMBERS = 2**21
#: Computation beside which an exchange is timed.
OVERLAPPED_S = 0.1
_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure_profile(topology: Topology, shape: ExpertShape, device: torch.device) -> Profile:
    """Measure everything that a layout of several ep ranks needs; every rank calls it.

    Args:
        topology: with the ep group to be measured.
        shape: of one expert, as the run will have it.
        device: of this rank.

    Returns:
        The same profile on every rank; what this layout does not have (a second node) keeps the device's default.
    """
    return _Bench(topology, shape, device).profile()


class _Bench:
    def __init__(self, topology: Topology, shape: ExpertShape, device: torch.device):
        self.topology, self.shape, self.device = topology, shape, device
        self.world, self.ep = topology["world"], topology["ep"]
        self.dtype = _TORCH[shape.dtype]
        self.names = collectives.gather_objects(own_node(), self.ep)
        may_share = topology.shared_memory and device.type == "cpu"
        self.shared = SharedRows.of(self.ep, 1) if may_share else None

    def profile(self) -> Profile:
        base = default_of(self.device)
        memory = self._memory()
        launch = self._launch()
        rate, half_rows = self._products(launch)
        inside, between, shared_nic = self._links(base)
        found = replace(
            base,
            source="measured",
            flops={**base.flops, self.shape.dtype: rate},
            half_rows=half_rows,
            launch_s=launch,
            memory_bytes_per_s=memory,
            row_passes=self._row_passes(memory),
            inside=inside,
            between=between,
            shared_nic=shared_nic,
        )
        if self.ep.size > 1:
            found = replace(found, chunk_s=self._chunk(), overlap=self._overlap(found))
            found = replace(found, tree_growth=self._growth(found))
        return collectives.broadcast_object(found, self.world)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _seconds(self, action: Callable[[], object], repeats: int = REPEATS) -> float:
        """Median time of an action that all ranks begin together, of the slowest rank."""
        action()
        taken = []
        for _ in range(repeats):
            collectives.barrier(self.world)
            self._wait()
            start = time.perf_counter()
            action()
            self._wait()
            taken.append(time.perf_counter() - start)
        slowest = torch.tensor(taken, dtype=torch.float64, device=self.device)
        return statistics.median(collectives.all_reduce(slowest, self.world, "max").tolist())

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _rows(self, count: int) -> Tensor:
        return torch.randn(count, self.shape.d_model, device=self.device).to(self.dtype)

    # --- one rank -----------------------------------------------------------------------------------------------------

    def _memory(self) -> float:
        source = torch.ones(2**24, device=self.device)
        target = torch.empty_like(source)
        return 2 * 4 * source.numel() / self._seconds(lambda: target.copy_(source))

    def _launch(self) -> float:
        one = self._rows(1)
        weight = one.new_zeros(1, self.shape.d_model)
        return self._seconds(lambda: [one @ weight.t() for _ in range(100)]) / 100

    def _experts(self, count: int) -> MLPExperts:
        activation = "swiglu" if self.shape.gated else "gelu"
        experts = MLPExperts(count, self.shape.d_model, self.shape.d_hidden, activation=activation, bias=False)
        return experts.to(self.device, self.dtype)

    def _products(self, launch: float) -> tuple[float, float]:
        """(FLOP/s, half_rows) of experts in both passes."""
        count = 4
        experts = self._experts(count)
        # Enough rows that products, and not the weights, take the time; few enough for a small machine.
        most = int(max(64, min(4096, 4e9 / max(self.shape.row_flops, 1))))
        sizes = sorted({max(16, most // 8), max(32, most // 4), max(48, most // 2), most})
        times = []
        for rows in sizes:
            x = self._rows(count * rows).requires_grad_()
            counts = torch.full((count,), rows, device=self.device)
            upstream = torch.ones_like(x)
            times.append(self._seconds(lambda x=x, c=counts, u=upstream: experts(x, c).backward(u)) / count)  # type: ignore[misc]
        return fit_products(sizes, times, self.shape, launch)

    def _row_passes(self, memory: float) -> float:
        tokens, top_k, count = 1024, 2, 8
        ids = torch.arange(tokens * top_k, device=self.device).view(tokens, top_k) % count
        weights = torch.rand(tokens, top_k, device=self.device)
        x = self._rows(tokens).requires_grad_()
        plan = ops.make_plan(ids, count)

        def there_and_back() -> None:
            y = ops.combine(ops.dispatch(x, plan), plan, weights)
            y.backward(torch.ones_like(y))

        return self._seconds(there_and_back) * memory / (tokens * top_k * self.shape.row_bytes)

    # --- links --------------------------------------------------------------------------------------------------------

    def _links(self, base: Profile) -> tuple[Link, Link, bool]:
        own = self.names[self.ep.rank]
        near = [rank for rank, name in enumerate(self.names) if name == own and rank != self.ep.rank]
        far = [rank for rank, name in enumerate(self.names) if name != own]
        counts = collectives.gather_objects((len(near), len(far)), self.world)
        most_near, most_far = (max(of) for of in zip(*counts, strict=True))
        inside = self._link(near, most_near) if most_near else base.inside
        if not most_far:
            return inside, base.between, base.shared_nic
        between = self._link(far, most_far)
        if most_near:
            # One rank of each node alone: where it is as much faster as there are ranks, they share the node's link.
            first = self.names.index(own) == self.ep.rank
            leaders = [rank for rank in far if self.names.index(self.names[rank]) == rank]
            alone = self._link(leaders if first else [], len(set(self.names)) - 1)
            places = most_near + 1
            if alone.bytes_per_s > 0.6 * places * between.bytes_per_s:
                return inside, Link(between.latency_s, places * between.bytes_per_s), True
        return inside, between, False

    def _link(self, peers: Sequence[int], most: int) -> Link:
        """Of exchanges with these group ranks; without any, this rank only takes part."""
        sizes, times = [], []
        for size in SIZES:
            rows = max(1, size // (most * self.shape.row_bytes))
            counts = [rows if rank in peers else 0 for rank in range(self.ep.size)]
            sizes.append(float(rows * most * self.shape.row_bytes))
            times.append(self._seconds(self._exchange(counts)))
            if times[-1] > LONG_S and len(times) > 1:
                break
        # Bandwidth from the largest ones: small messages may slip through buffers that large ones fill.
        rate = fit_link(sizes[-2:], times[-2:]).bytes_per_s
        # As the model counts messages: the first in full, each next one a tenth.
        return Link(max(0.0, times[0] - sizes[0] / rate) / (1 + 0.1 * (most - 1)), rate)

    def _exchange(self, counts: list[int]) -> Callable[[], object]:
        rows = self._rows(sum(counts))
        if self.shared is None:
            return lambda: collectives.all_to_all_rows(rows, counts, counts, self.ep)
        ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
        blocks = [[(end - count, end)] for end, count in zip(ends, counts, strict=True)]
        shared, out = self.shared, torch.empty_like(rows)
        return lambda: shared.exchange(self.ep, rows, blocks, out, blocks)

    def _growth(self, profile: Profile) -> float:
        """What one shadowed expert costs beyond its bytes over one link: its parameters to all, its gradient back."""
        ranks = self.ep.size
        if ranks == 2:
            return profile.tree_growth  # a tree of two has one level
        numbers = min(self.shape.parameters, SHADOW_NUMBERS)
        message = Message(self.ep, (0,), 1, numbers)
        own = self._rows(1).new_ones(numbers if self.ep.rank == 0 else 0)
        whole = self._rows(1).new_ones(numbers)
        times = [self._seconds(lambda: spread(own, message)), self._seconds(lambda: collect(whole, message))]
        grouping = grouping_of(self.names)
        link = group_link(profile, ranks, grouping.per_node)
        return fit_tree_growth([ranks, ranks], times, numbers * own.element_size(), link)

    # --- chunks -------------------------------------------------------------------------------------------------------

    def _chunked(self, experts: MLPExperts, rows_each: int, chunks: int) -> Callable[[], object]:
        local = experts.num_local
        sent = [[rows_each] * local for _ in range(self.ep.size)]
        arrived = torch.full((self.ep.size, local), rows_each, device=self.device)
        rows = self._rows(rows_each * local * self.ep.size)

        def compute(part: Tensor, chunk: tuple[int, int], of_chunk: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
            counts = arrived[:, slice(*chunk)]
            return ops.regroup(of_chunk(ops.regroup(part, counts), counts.sum(0)), counts, inverse=True)

        def forward() -> None:
            with torch.no_grad():
                run_chunked(experts, rows, sent, sent, cut(local, chunks), self.ep, compute)

        return forward

    def _chunk(self) -> float:
        """Seconds of one more chunk beside its messages: exchanges of next to nothing, in two and in eight chunks."""
        experts = MLPExperts(8, self.shape.d_model, 8, activation="gelu", bias=False).to(self.device, self.dtype)
        counts = [2, 4, 8]
        times = [self._seconds(self._chunked(experts, 1, chunks)) for chunks in counts]
        _, slope = line(counts, times)
        # A chunk costs at both exchanges and at its computation.
        return slope / 3

    def _overlap(self, profile: Profile) -> float:
        """Share of an exchange that does not slow the computation beside it."""
        experts, ranks = self._experts(4), self.ep.size
        x = self._rows(512)
        counts = torch.full((4,), 128, device=self.device)

        def once() -> None:
            with torch.no_grad():
                experts(x, counts)

        # Long enough that starts and ends do not count.
        rounds = max(1, min(1000, round(OVERLAPPED_S / self._seconds(once))))

        def compute() -> None:
            for _ in range(rounds):
                once()

        busy = self._seconds(compute)
        link = profile.between if len(set(self.names)) > 1 else profile.inside
        rows = max(1, int(busy * link.bytes_per_s / self.shape.row_bytes / (ranks - 1)))
        sources = {rank: self._rows(rows) for rank in range(ranks) if rank != self.ep.rank}
        targets = {rank: torch.empty_like(source) for rank, source in sources.items()}
        travel = self._seconds(lambda: collectives.start(sources, targets, self.ep, 0).wait())

        def both() -> None:
            pending = collectives.start(sources, targets, self.ep, 0)
            compute()
            pending.wait()

        together = self._seconds(both)
        hidden = busy + travel - together
        return min(1.0, max(0.0, hidden / min(busy, travel)))


def described(profile: Profile, shape: ExpertShape) -> str:
    """The measured coefficients, a line each."""
    links = [
        f"{name:<9}{link.bytes_per_s / 1e9:8.3f} GB/s, {link.latency_s * 1e6:.0f} us a message"
        for name, link in (("inside", profile.inside), ("between", profile.between))
    ]
    return "\n".join(
        [
            f"products {profile.flops[shape.dtype] / 1e9:8.1f} GFLOP/s in {shape.dtype}, half of it at "
            f"{profile.half_rows:.0f} rows of an expert",
            f"memory   {profile.memory_bytes_per_s / 1e9:8.1f} GB/s, {profile.row_passes:.1f} passes over a row",
            *links,
            f"chunk    {profile.chunk_s * 1e6:8.0f} us, {100 * profile.overlap:.0f} % of an exchange hidden",
        ]
    )
