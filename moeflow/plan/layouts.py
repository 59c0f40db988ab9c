"""All layouts that a model and a number of ranks allow."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from moeflow.plan.model_size import ModelSize
from moeflow.plan.partition import partition
from moeflow.schema.layout import divisors

#: Beyond these, collectives inside a layer cross nodes many times a step, and no published run goes further.
MAX_TP, MAX_ETP = 64, 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout with its micro-batches.

    Attributes:
        world: ranks.
        pp, tp, ep, etp: as of `parallel.*`.
        micro_batch: samples of one pipeline micro-batch on one data rank.
        micro_batches: of one step and data rank: accumulation, or pipeline micro-batches where pp > 1.
        split: layers of each stage.
        checkpointing: activations are computed again in backward.
    """

    world: int
    pp: int
    tp: int
    ep: int
    etp: int
    micro_batch: int
    micro_batches: int
    split: tuple[int, ...]
    checkpointing: bool = False

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense part."""
        return self.world // (self.pp * self.tp)

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.world // (self.pp * self.ep * self.etp)

    @property
    def pipeline_batches(self) -> int:
        """Micro-batches that a pipeline takes at once; without one, each is done before the next."""
        return self.micro_batches if self.pp > 1 else 1


def candidates(
    model: ModelSize, world: int, batch: int, checkpointing: tuple[bool, ...] = (False, True), fixed: dict | None = None
) -> Iterator[Candidate]:
    """Yield what divides: layouts x micro-batches x checkpointing.

    Args:
        model: sizes.
        world: ranks.
        batch: samples of one step over all ranks.
        checkpointing: choices to try.
        fixed: pp, tp, ep or etp that are given, or checkpointing.
    """
    fixed = fixed or {}
    if "checkpointing" in fixed:
        checkpointing = (bool(fixed["checkpointing"]),)
    layers = len(model.layers)
    for pp in _choices(world, "pp", fixed, layers):
        split = stage_split(model.costs, model.head_cost, pp)
        stage = world // pp
        for tp in _choices(stage, "tp", fixed, MAX_TP):
            dp = stage // tp
            if batch % dp or any(count % tp for _, count in model.heads):
                continue
            for micro, number in _micro_batches(batch // dp):
                if pp > 1 and number < pp:
                    continue  # 1F1B needs a micro-batch for each stage
                for ep, etp in _expert_sizes(model, stage, fixed):
                    for again in checkpointing:
                        yield Candidate(world, pp, tp, ep, etp, micro, number, split, again)


def _choices(total: int, axis: str, fixed: dict, most: int) -> list[int]:
    if axis in fixed:
        return [fixed[axis]] if total % fixed[axis] == 0 else []
    return [d for d in divisors(total) if d <= most] if total <= 10**7 else []


def _expert_sizes(model: ModelSize, stage: int, fixed: dict) -> list[tuple[int, int]]:
    if model.num_experts == 0:
        return [(1, 1)] if fixed.get("ep", 1) == fixed.get("etp", 1) == 1 else []
    hidden = {layer.d_hidden for layer in model.layers if layer.num_experts}
    return [
        (ep, etp)
        for etp in _choices(stage, "etp", fixed, MAX_ETP)
        if all(width % etp == 0 for width in hidden)
        for ep in _choices(stage // etp, "ep", fixed, model.num_experts)
        if model.num_experts % ep == 0
    ]


def _micro_batches(share: int) -> list[tuple[int, int]]:
    """(samples of a micro-batch, micro-batches): powers of two, and the share itself where it is small."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if share % size == 0]
    if share <= 512 and share not in sizes:
        sizes.append(share)
    return [(size, share // size) for size in sizes]


@functools.lru_cache(maxsize=256)
def stage_split(costs: tuple[float, ...], head_cost: float, pp: int) -> tuple[int, ...]:
    """Layers of each pipeline stage, cut as `parallel.pipeline` cuts them."""
    return tuple(partition(costs, pp, 0.0, head_cost)) if pp > 1 else (len(costs),)


@functools.lru_cache(maxsize=256)
def critical_stages(model: ModelSize, split: tuple[int, ...]) -> tuple[int, ...]:
    """Stages of which one is the fullest: both ends, and the first of each composition of layers.

    Of stages alike, the first has most micro-batches under way.
    """
    first: dict[tuple, int] = {}
    start = 0
    for stage, size in enumerate(split):
        layers = model.layers[start : start + size]
        first.setdefault(tuple(sorted((layer.num_experts, layer.cut, layer.whole) for layer in layers)), stage)
        start += size
    return tuple(sorted({0, len(split) - 1, *first.values()}))
