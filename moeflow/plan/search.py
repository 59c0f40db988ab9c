"""The best layouts of a model on a cluster, and why: each choice is held against its neighbours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moeflow.errors import ConfigError
from moeflow.plan.layouts import Candidate, candidates, critical_stages
from moeflow.plan.memory import Memory, memory_of
from moeflow.plan.step_time import StepModel, StepTime

_AXES = ("pp", "tp", "ep", "etp", "micro_batch", "checkpointing")


@dataclass(frozen=True, slots=True)
class Proposal:
    """One layout with its prediction.

    Attributes:
        plan: the layout.
        time: predicted.
        memory: of the fullest rank.
        stage: pipeline stage of that rank.
        utilization: model FLOPs over the ranks' rate.
    """

    plan: Candidate
    time: StepTime
    memory: Memory
    stage: int
    utilization: float


@dataclass(frozen=True, slots=True)
class Search:
    """What was found.

    Attributes:
        proposals: the best, fastest first.
        tried: number of layouts looked at.
        fitting: of these, how many fit in memory.
        reasons: one line for each axis of the best.
    """

    proposals: tuple[Proposal, ...]
    tried: int
    fitting: int
    reasons: tuple[str, ...]


def search(model: StepModel, batch: int, keep: int = 5, fixed: dict | None = None, world: int | None = None) -> Search:
    """Try all layouts.

    Args:
        model: of the step, with the cluster and the model's sizes.
        batch: samples of one step over all ranks.
        keep: proposals to return.
        fixed: axes that are given (pp, tp, ep, etp, checkpointing).
        world: ranks; None takes the cluster's.

    Raises:
        ConfigError: nothing divides, or nothing fits.
    """
    ranks = world or model.cluster.ranks
    usable = model.cluster.usable_bytes
    fits: dict[tuple, tuple[float, Candidate]] = {}
    tight: dict[tuple, tuple[int, Candidate]] = {}
    for plan in candidates(model.model, ranks, batch, fixed=fixed):
        size = fullest(model, plan)[0].total
        if size > usable:
            tight[_key(plan)] = (size, plan)
        else:
            fits[_key(plan)] = (model.step(plan).total_s, plan)
    if not fits:
        raise _nothing_fits(model, ranks, batch, tight.values())
    # Equally fast: the plainer one.
    best = sorted(fits.values(), key=lambda item: (item[0], _key(item[1])))[:keep]
    proposals = [
        Proposal(plan, model.step(plan), *fullest(model, plan), model.utilization(plan, seconds))
        for seconds, plan in best
    ]
    reasons = _reasons(model, proposals[0], fits, tight)
    return Search(tuple(proposals), len(fits) + len(tight), len(fits), tuple(reasons))


def fullest(model: StepModel, plan: Candidate) -> tuple[Memory, int]:
    """(memory, stage) of the rank that needs most."""
    skew = model.skew(plan)
    stages = critical_stages(model.model, plan.split)
    found = [(memory_of(model.model, plan, model.dtype, stage, skew), stage) for stage in stages]
    return max(found, key=lambda item: (item[0].total, -item[1]))


def _key(plan: Candidate) -> tuple:
    return tuple(getattr(plan, axis) for axis in _AXES)


def _reasons(model: StepModel, best: Proposal, fits: dict, tight: dict) -> list[str]:
    """For each axis: the best layout with the next smaller and the next larger value, everything else free."""
    by_value: dict[str, dict[int, float]] = {axis: {} for axis in _AXES}
    for key, (seconds, _) in fits.items():
        for axis, value in zip(_AXES, key):
            known = by_value[axis]
            known[value] = min(seconds, known.get(value, seconds))
    least: dict[str, dict[int, int]] = {axis: {} for axis in _AXES}
    for key, (size, _) in tight.items():
        for axis, value in zip(_AXES, key):
            least[axis][value] = min(size, least[axis].get(value, size))
    lines = []
    for axis, value in zip(_AXES, _key(best.plan)):
        values = sorted({*by_value[axis], *least[axis]})
        at = values.index(value)
        told = []
        for other in [*values[max(0, at - 1) : at], *values[at + 1 : at + 2]]:
            if other in by_value[axis]:
                ratio = by_value[axis][other] / best.time.total_s
                told.append(f"{_value(other)} at best {100 * (ratio - 1):.1f} % slower")
            else:
                gib = least[axis][other] / 2**30
                told.append(f"{_value(other)} does not fit ({gib:.1f} GiB at least)")
        rest = "; ".join(told) if told else "no other value divides"
        lines.append(f"{axis.replace('_', ' ')} {_value(value)}: {rest}")
    return lines


def _value(value: int | bool) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _nothing_fits(model: StepModel, ranks: int, batch: int, tight: Iterable[tuple[int, Candidate]]) -> ConfigError:
    found = min(tight, key=lambda item: item[0], default=None)
    if found is None:
        return ConfigError(
            f"no layout of {ranks} ranks divides this model and a batch of {batch} samples",
            f"a data.batch_size that is a multiple of {ranks}, or fewer ranks",
        )
    size, plan = found
    return ConfigError(
        f"nothing fits: the smallest layout of {ranks} ranks (pp {plan.pp}, tp {plan.tp}, ep {plan.ep}, "
        f"etp {plan.etp}, micro-batch {plan.micro_batch}) needs {size / 2**30:.1f} GiB a rank, and "
        f"{model.cluster.usable_bytes / 2**30:.1f} GiB may be used",
        "more ranks, more memory a rank, a smaller model, or precision=bf16",
    )
