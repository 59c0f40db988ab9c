"""Predicted seconds of one optimizer step of a layout, part by part.

Parts follow one another unless said otherwise, as they do in moeflow today: gradients are reduced after the last
backward pass, and the exchange of tokens overlaps computation only where it is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from moeflow.plan.cluster import Cluster
from moeflow.plan.cost import (
    ExpertShape,
    Grouping,
    all_gather_s,
    all_reduce_s,
    even_exchange_s,
    products_s,
)
from moeflow.plan.layouts import Candidate
from moeflow.plan.memory import FP32, layer_bytes, stage_holding
from moeflow.plan.model_size import LayerSize, ModelSize
from moeflow.plan.overlap import choose_chunks
from moeflow.plan.profile import DTYPE_BYTES, Link

#: Kernels of one block, forward and backward, besides the experts' products.
_KERNELS = 60
#: Passes over what a block keeps: written and read forward, read backward, its gradient written.
_PASSES = 4
#: Bytes of AdamW's update of one parameter: value, gradient and two moments read, three of them written.
_UPDATE_BYTES = 28


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; all fields but `chunks` and `hierarchical` add up to the total.

    Attributes:
        dense_s: attention, dense MLPs, gates, head, and memory-bound work.
        experts_s: products and permutation of the busiest rank.
        exchange_s: all-to-alls that computation does not hide.
        tensor_s: collectives over tp and etp.
        recompute_s: forward passes done again.
        transfer_s: activations between pipeline stages.
        bubble_s: pipeline stages that wait.
        reduce_s: gradients over dp and edp.
        optimizer_s: AdamW.
        chunks: of the all-to-all.
        hierarchical: all-to-all in two hops.
    """

    dense_s: float
    experts_s: float
    exchange_s: float
    tensor_s: float
    recompute_s: float
    transfer_s: float
    bubble_s: float
    reduce_s: float
    optimizer_s: float
    chunks: int = 1
    hierarchical: bool = False

    @property
    def total_s(self) -> float:
        """The step."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name.endswith("_s"))


@dataclass(frozen=True, slots=True)
class _Block:
    """Seconds of one block and micro-batch: forward and backward."""

    dense: float
    experts: float
    exchange: float
    tensor: float
    forward: float
    chunks: int = 1
    hierarchical: bool = False

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.exchange + self.tensor


class StepModel:
    """Times the layouts of one model on one cluster.

    Args:
        model: sizes.
        cluster: ranks and coefficients.
        dtype: `precision.dtype`.
        imbalance: rows of the busiest rank over the mean, where experts are spread over ranks; by ep where it differs.
        overlap: whether chunks may be used.
    """

    def __init__(
        self,
        model: ModelSize,
        cluster: Cluster,
        dtype: str,
        imbalance: float | Mapping[int, float] = 1.2,
        overlap: bool = True,
    ):
        self.model, self.cluster, self.dtype = model, cluster, dtype
        self._imbalance, self.overlap = imbalance, overlap
        self.profile = cluster.profile
        self.rate = self.profile.rate(dtype)
        self.bytes = DTYPE_BYTES[dtype]
        self._kinds = list(dict.fromkeys(model.layers))
        self._kind_of = [self._kinds.index(layer) for layer in model.layers]

    def skew(self, plan: Candidate) -> float:
        """Rows of the busiest rank over the mean; 1 where every rank holds all experts."""
        if plan.ep == 1:
            return 1.0
        return self._imbalance[plan.ep] if isinstance(self._imbalance, Mapping) else self._imbalance

    def step(self, plan: Candidate) -> StepTime:
        """Predict one step."""
        blocks = [self._block(kind, plan) for kind in self._kinds]
        stages, start = [], 0
        for size in plan.split:
            stages.append([blocks[kind] for kind in self._kind_of[start : start + size]])
            start += size
        ends = self._ends(plan)
        again = [sum(b.forward for b in stage) if plan.checkpointing else 0.0 for stage in stages]
        times = [sum(b.total for b in stage) + again[i] for i, stage in enumerate(stages)]
        times[-1] += ends
        slowest = max(range(plan.pp), key=times.__getitem__)
        stage, number = stages[slowest], plan.micro_batches
        transfer = self._transfer(plan)
        moe = next((b for b in blocks if b.exchange), blocks[0])
        return StepTime(
            dense_s=number * (sum(b.dense for b in stage) + (ends if slowest == plan.pp - 1 else 0.0)),
            experts_s=number * sum(b.experts for b in stage),
            exchange_s=number * sum(b.exchange for b in stage),
            tensor_s=number * sum(b.tensor for b in stage),
            recompute_s=number * again[slowest],
            transfer_s=number * transfer,
            bubble_s=(plan.pp - 1) * (times[slowest] + transfer),
            reduce_s=self._reduce(plan),
            optimizer_s=self._update(plan),
            chunks=moe.chunks,
            hierarchical=moe.hierarchical,
        )

    def utilization(self, plan: Candidate, seconds: float) -> float:
        """Model FLOPs (forward and backward, nothing done again) over what all ranks could do in a step."""
        tokens = plan.micro_batch * plan.micro_batches * plan.dp * self.model.seq_len
        return 3 * self.model.token_flops() * tokens / (seconds * plan.world * self.rate)

    def _block(self, layer: LayerSize, plan: Candidate) -> _Block:
        tokens = plan.micro_batch * self.model.seq_len
        matrices = 2.0 * tokens * (layer.cut + layer.whole_matrices)
        scores = tokens * layer.score_width * self.model.seq_len
        products = (matrices + scores) / plan.tp / self.rate
        kept = layer_bytes(self.model, layer, plan, self.dtype, tokens, 1.0)
        memory = _PASSES * kept / self.profile.memory_bytes_per_s
        dense = 3 * products + memory + _KERNELS * self.profile.launch_s
        tensor = self._tensor(layer, plan, tokens)
        if layer.num_experts == 0:
            return _Block(dense, 0.0, 0.0, tensor, products + memory / 4 + tensor / 2)
        rows = tokens / plan.tp * min(self.model.top_k, layer.num_experts)
        experts, forward = self._experts(layer, plan, rows)
        exchange, chunks, hierarchical = self._exchange(layer, plan, rows, forward, experts - forward)
        once = products + memory / 4 + tensor / 2 + forward + exchange / 2
        return _Block(dense, experts, exchange, tensor, once, chunks, hierarchical)

    def _shape(self, layer: LayerSize, plan: Candidate) -> ExpertShape:
        return ExpertShape(self.model.d_model, layer.d_hidden // plan.etp, True, self.dtype)

    def _experts(self, layer: LayerSize, plan: Candidate, rows: float) -> tuple[float, float]:
        """(forward and backward, forward) seconds of the busiest rank's experts."""
        local = layer.num_experts // plan.ep
        shape = self._shape(layer, plan)
        busiest = rows * plan.etp * self.skew(plan)
        each = [float(products_s(self.profile, shape, busiest / local, back)) * local for back in (True, False)]
        permute = busiest * shape.row_bytes * self.profile.row_passes / self.profile.memory_bytes_per_s
        return each[0] + permute, each[1] + permute / 3

    def _exchange(
        self, layer: LayerSize, plan: Candidate, rows: float, forward: float, backward: float
    ) -> tuple[float, int, bool]:
        """(seconds that are not hidden, chunks, two hops) of the four all-to-alls."""
        if plan.ep == 1:
            return 0.0, 1, False
        group = Grouping(plan.ep, self.cluster.near(plan.ep, plan.etp))
        size = rows * self.model.d_model * self.bytes
        profile = self.profile
        flat, two = (even_exchange_s(profile, group, size, self.skew(plan), h) for h in (False, True))
        one, empty = min(flat, two), even_exchange_s(profile, group, 0.0, 1.0, two < flat)
        if not self.overlap:
            return 4 * one, 1, two < flat
        fixed = min(forward, layer.num_experts // plan.ep * 3 * profile.launch_s)
        choice = choose_chunks(profile, one, forward, fixed, latency_s=empty)
        back = choose_chunks(profile, one, backward, 2 * fixed, latency_s=empty)
        saved = choice.plain_s - choice.chunked_s + back.plain_s - back.chunked_s
        return max(0.0, 4 * one - saved), choice.chunks, two < flat

    def _tensor(self, layer: LayerSize, plan: Candidate, tokens: float) -> float:
        """Seconds of the collectives over tp and etp in one block."""
        seconds = 0.0
        if plan.tp > 1:
            whole = tokens * self.model.d_model * self.bytes
            once = all_reduce_s(self._link(plan.tp, 1), plan.tp, whole)
            # Attention: one forward, one backward.  A dense MLP as well; an MoE layer gathers its slices instead.
            seconds += 2 * once + (2 * once if layer.num_experts == 0 else once)
        if plan.etp > 1 and layer.num_experts:
            rows = tokens / plan.tp * min(self.model.top_k, layer.num_experts) * plan.etp
            size = rows * self.model.d_model * self.bytes
            seconds += 4 * all_gather_s(self._link(plan.etp, 1), plan.etp, size)
        return seconds

    def _ends(self, plan: Candidate) -> float:
        """Seconds of the head and the loss of one micro-batch, on the last stage."""
        tokens = plan.micro_batch * self.model.seq_len
        logits = tokens * self.model.vocab_size / plan.tp
        products = 6.0 * logits * self.model.d_model / self.rate
        return products + 6 * logits * FP32 / self.profile.memory_bytes_per_s

    def _transfer(self, plan: Candidate) -> float:
        if plan.pp == 1:
            return 0.0
        link = self._link(2, plan.world // plan.pp)
        size = plan.micro_batch * self.model.seq_len * self.model.d_model * FP32
        return 2 * (link.latency_s + size / link.bytes_per_s)

    def _reduce(self, plan: Candidate) -> float:
        slowest = 0.0
        for stage in {0, plan.pp - 1}:
            held = stage_holding(self.model, plan, stage)
            dense = all_reduce_s(self._link(plan.dp, plan.tp), plan.dp, held.dense * FP32)
            experts = all_reduce_s(self._link(plan.edp, plan.ep * plan.etp), plan.edp, held.experts * FP32)
            slowest = max(slowest, dense + experts)
        return slowest

    def _update(self, plan: Candidate) -> float:
        held = [stage_holding(self.model, plan, stage) for stage in {0, plan.pp - 1}]
        most = max(h.dense + h.experts for h in held)
        return most * (_UPDATE_BYTES + FP32) / self.profile.memory_bytes_per_s

    def _link(self, size: int, stride: int) -> Link:
        """The slowest link of a group; a node's one link is shared by all of its ranks."""
        if self.cluster.near(size, stride) >= size:
            return self.profile.inside
        between = self.profile.between
        if self.profile.shared_nic:
            return Link(between.latency_s, between.bytes_per_s / self.cluster.ranks_per_node)
        return between
