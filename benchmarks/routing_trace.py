"""Balancing policies on a recorded routing trace, under one cost model: how even loads are, and what that costs.

    python benchmarks/routing_trace.py --trace routing_trace.npz
    python benchmarks/routing_trace.py --trace routing_trace.npz --ranks 8 --lag 0

The trace's sources become the ranks (neighbours merged where there are fewer), experts are spread evenly over them.
Plans (placement, replicas) see loads that are `--lag` samples old; splits over replicas and shadows see the step's own
counts, as they would in a run.  Every number is a mean over all layers and samples.  Nothing is timed but the
decisions themselves.

Legend: S samples, R ranks, L layers, E experts.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from published_policies import eplb, even_room, fastmoe_shadows, smartmoe_placement, smartmoe_shadows

from moeflow.plan.balance import balance_step
from moeflow.plan.cost import ExpertShape, Grouping
from moeflow.plan.layer_cost import Work, layer_time, work_of
from moeflow.plan.placement import place_experts, smooth
from moeflow.plan.profile import DEFAULTS, Link, Profile
from moeflow.plan.replicas import ReplicaPlan, assign_rows, plan_replicas, work_with_replicas
from moeflow.plan.shadow import row_costs
from moeflow.plan.traces import Trace, load_trace

# The machine that the reference scored policies for: 112 TFLOP/s in half precision, 8 GB/s a rank, one flat network.
NETWORK = Link(1e-5, 8e9)
MACHINE = replace(
    DEFAULTS["v100"], flops={"fp16": 1.12e14}, half_rows=0.0, launch_s=0.0, inside=NETWORK, between=NETWORK
)
# Weight of the past in our forecasts; samples are 50 iterations apart.  The published policies see the newest sample.
DECAY = 0.1
SHAPE = ExpertShape(d_model=1536, d_hidden=3072, dtype="fp16", param_bytes=2, grad_bytes=2)


@dataclass(frozen=True)
class Step:
    """What one layer's policy sees: loads of the past (newest last), and the step's own counts [R, E]."""

    past: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class Outcome:
    """What a policy made of a step."""

    work: Work
    shadows: int = 0
    replica_hosts: list[int] | None = None


Policy = Callable[[Step], Outcome]


def forecast(step: Step, decay: float) -> NDArray[np.float64]:
    """[E] smoothed history."""
    history = None
    for load in step.past[-6:]:
        history = smooth(history, load, decay)
    return history


def steps_of(trace: Trace, ranks: int, lag: int, stride: int = 1, skip: int = 2) -> Iterator[tuple[int, list[Step]]]:
    """Per layer, the samples from the `skip`-th on (the same ones for every lag); every `stride`-th layer."""
    samples, sources, layers, experts = trace.counts.shape
    merged = trace.counts.reshape(samples, ranks, sources // ranks, layers, experts).sum(2)
    for layer in range(0, layers, stride):
        counts = merged[:, :, layer]
        loads = counts.sum(1)
        yield layer, [Step(loads[: s - lag + 1], counts[s]) for s in range(skip, samples)]


def policies(ranks: int, experts: int, profile: Profile, decay: float) -> dict[str, Policy]:
    """All rows of the table."""
    costs = row_costs(profile, SHAPE, Grouping(ranks, ranks), experts)
    contiguous = np.arange(experts) * ranks // experts
    alpha, rate, wire = SHAPE.d_hidden / SHAPE.d_model, profile.rate(SHAPE.dtype), profile.inside.bytes_per_s

    def owned(owner: NDArray, counts: NDArray, shadows: tuple[int, ...]) -> Outcome:
        return Outcome(work_of(counts, owner, shadows), len(shadows))

    def none(step: Step) -> Outcome:
        return owned(contiguous, step.counts, ())

    def fastmoe(step: Step) -> Outcome:
        return owned(contiguous, step.counts, fastmoe_shadows(step.counts, SHAPE.d_model, alpha, wire, rate))

    def artifact(step: Step) -> Outcome:
        return owned(
            contiguous, step.counts, smartmoe_shadows(step.counts, contiguous, SHAPE.d_model, alpha, wire, rate)
        )

    def smartmoe(step: Step) -> Outcome:
        return owned(smartmoe_placement(step.past[-1], contiguous, ranks), step.counts, ())

    def shadow(step: Step) -> Outcome:
        found = balance_step(step.counts, contiguous, costs)
        return Outcome(found.work, len(found.shadows.experts))

    def place(step: Step) -> Outcome:
        return owned(place_experts(forecast(step, decay), ranks), step.counts, ())

    def place_and_shadow(step: Step) -> Outcome:
        found = balance_step(step.counts, place_experts(forecast(step, decay), ranks), costs)
        return Outcome(found.work, len(found.shadows.experts))

    def published_replicas(spare: int) -> Policy:
        def policy(step: Step) -> Outcome:
            held = eplb(step.past[-1].astype(float), ranks, experts // ranks + spare)
            moves = assign_rows(step.counts, even_room(held, step.counts.sum(0)))
            hosts = [sum(e in h for h in held) for e in range(experts)]
            return Outcome(work_with_replicas(moves), 0, [n for n in hosts if n > 1])

        return policy

    def published_slots(spare: int) -> Policy:
        def policy(step: Step) -> Outcome:
            held = eplb(step.past[-1].astype(float), ranks, experts // ranks + spare)
            hosts = [tuple(rank for rank, h in enumerate(held) if e in h) for e in range(experts)]
            shares = tuple(tuple(1 / len(h) for _ in h) for h in hosts)
            plan = ReplicaPlan(ranks, tuple(hosts), shares)
            return Outcome(balance_step(step.counts, plan, costs, shadow=False).work, 0, plan.replicated())

        return policy

    def replicas(spare: int, shadowed: bool) -> Policy:
        def policy(step: Step) -> Outcome:
            plan = plan_replicas(forecast(step, decay), ranks, experts // ranks + spare)
            found = balance_step(step.counts, plan, costs, shadow=shadowed)
            return Outcome(found.work, len(found.shadows.experts), plan.replicated())

        return policy

    table: dict[str, Policy] = {
        "none": none,
        "FasterMoE's shadows, as in FastMoE": fastmoe,
        "FasterMoE's shadows, as in SmartMoE's artifact": artifact,
        "moeflow shadows": shadow,
        "SmartMoE's placement": smartmoe,
        "moeflow placement": place,
        "moeflow placement + shadows": place_and_shadow,
    }
    for spare in (1, 2):
        table[f"EPLB, {spare} spare"] = published_replicas(spare)
        table[f"EPLB, {spare} spare, rows split by moeflow"] = published_slots(spare)
        table[f"moeflow replicas, {spare} spare"] = replicas(spare, False)
        table[f"moeflow replicas, {spare} spare + shadows"] = replicas(spare, True)
    return table


@dataclass
class Row:
    """Means of one policy."""

    name: str
    imbalance: float
    worst: float
    shadows: float
    step_ms: float
    decide_ms: float


def evaluate(trace: Trace, ranks: int, lag: int, profile: Profile = MACHINE, stride: int = 1) -> list[Row]:
    """Score all policies on every `stride`-th layer."""
    grouping = Grouping(ranks, ranks)
    rows = []
    for name, policy in policies(ranks, trace.counts.shape[3], profile, DECAY if lag else 0.0).items():
        imbalance, shadows, times, spent = [], [], [], 0.0
        for _, steps in steps_of(trace, ranks, lag, stride):
            for step in steps:
                started = time.process_time()
                found = policy(step)
                spent += time.process_time() - started
                imbalance.append(found.work.imbalance)
                shadows.append(found.shadows)
                predicted = layer_time(profile, SHAPE, grouping, found.work, found.shadows, found.replica_hosts)
                times.append(predicted.total_s)
        count = len(times)
        rows.append(
            Row(
                name,
                float(np.mean(imbalance)),
                float(np.quantile(imbalance, 0.99)),
                float(np.mean(shadows)),
                1e3 * float(np.mean(times)),
                1e3 * spent / count,
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help=".npz with counts [S, R, L, E] and iteration [S]")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 8])
    parser.add_argument("--lag", type=int, nargs="+", default=[2, 0], help="age of loads that plans see, in samples")
    args = parser.parse_args()
    trace = load_trace(args.trace)
    print(f"{date.today()}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}\n")
    for ranks in args.ranks:
        for lag in args.lag:
            age = int((trace.iteration[2:] - trace.iteration[:-2]).mean() * lag / 2) if lag else 0
            experts = trace.counts.shape[3]
            print(f"{ranks} ranks x {experts // ranks} experts, plans from loads {age} iterations old\n")
            print("| policy | load max/mean | 99th of 100 | shadows | model, ms | decision, ms |")
            print("|---|---|---|---|---|---|")
            for row in evaluate(trace, ranks, lag):
                print(
                    f"| {row.name} | {row.imbalance:.3f} | {row.worst:.2f} | {row.shadows:.2f} | {row.step_ms:.1f} "
                    f"| {row.decide_ms:.2f} |"
                )
            print(flush=True)


if __name__ == "__main__":
    main()
