"""The text and the JSON of `moeflow plan`."""

from __future__ import annotations

import dataclasses
from typing import Any

from moeflow.plan.balance_study import Study
from moeflow.plan.memory import Memory, stage_holding
from moeflow.plan.search import Proposal, Search
from moeflow.plan.step_time import StepModel, StepTime

_GIB = 2**30


def as_text(model: StepModel, found: Search, study: Study | None, words: list[str]) -> str:
    """Return the report."""
    best = found.proposals[0]
    parts = [
        _head(model, found),
        _table(found),
        _time(best.time),
        _memory(model, best),
        "\n".join(
            ["why", *(f"  {reason}" for reason in found.reasons), *(f"  {line}" for line in _remarks(best.time, words))]
        ),
    ]
    if study is not None and best.plan.ep > 1:
        parts.append(_gains(study, best))
    parts.append("\n".join(["words for moeflow train", f"  {' '.join(words)}"]))
    return "\n\n".join(parts)


def _head(model: StepModel, found: Search) -> str:
    size, cluster, profile = model.model, model.cluster, model.cluster.profile
    tokens = found.proposals[0].plan
    batch = tokens.dp * tokens.micro_batch * tokens.micro_batches
    experts = f"{size.num_experts} experts a layer, {size.top_k} for each token" if size.num_experts else "no experts"
    return "\n".join(
        [
            f"model     {size.parameters:,} parameters, {size.active:,} active; {len(size.layers)} layers, {experts}",
            f"cluster   {cluster.nodes:,} x {cluster.ranks_per_node} ranks, {profile.device} ({profile.source} "
            f"coefficients), {profile.memory_bytes / _GIB:.1f} GiB each, {100 * (1 - cluster.reserve):.0f} % for use",
            f"step      {batch:,} samples of {size.seq_len:,} tokens, {model.dtype}",
            f"searched  {found.tried:,} layouts, {found.fitting:,} fit",
        ]
    )


def _table(found: Search) -> str:
    lines = [
        "      pp   tp   ep  etp      dp     edp  micro x number  recompute  chunks   step s      GiB  FLOPs used",
    ]
    for number, proposal in enumerate(found.proposals, 1):
        plan, time = proposal.plan, proposal.time
        lines.append(
            f"{number:>3}{plan.pp:>5}{plan.tp:>5}{plan.ep:>5}{plan.etp:>5}{plan.dp:>8}{plan.edp:>8}"
            f"{plan.micro_batch:>7} x {plan.micro_batches:<6}  {'yes' if plan.checkpointing else 'no':>8}"
            f"{time.chunks:>8}{time.total_s:>9.4g}{proposal.memory.total / _GIB:>9.2f}"
            f"{100 * proposal.utilization:>10.1f} %"
        )
    return "\n".join(lines)


def _time(time: StepTime) -> str:
    names = {
        "dense_s": "attention, dense MLPs, head",
        "experts_s": "experts of the busiest rank",
        "exchange_s": "all-to-all that is not hidden",
        "tensor_s": "collectives over tp and etp",
        "recompute_s": "forward done again",
        "transfer_s": "between pipeline stages",
        "bubble_s": "pipeline stages that wait",
        "reduce_s": "gradients over dp and edp",
        "optimizer_s": "optimizer",
    }
    rows = [(text, getattr(time, field)) for field, text in names.items()]
    lines = ["predicted seconds of a step of the first"]
    lines += [f"  {text:<32}{seconds:>12.5f}" for text, seconds in rows]
    return "\n".join([*lines, f"  {'total':<32}{time.total_s:>12.5f}"])


def _memory(model: StepModel, best: Proposal) -> str:
    lines = [f"predicted memory of its fullest rank (pipeline stage {best.stage}), bytes and GiB"]
    for field in dataclasses.fields(Memory):
        size = getattr(best.memory, field.name)
        lines.append(f"  {field.name.replace('_', ' '):<24}{size:>20,}{size / _GIB:>10.2f}")
    total = best.memory.total
    lines.append(f"  {'total':<24}{total:>20,}{total / _GIB:>10.2f}")
    usable = model.cluster.usable_bytes
    lines.append(f"  {'for use':<24}{usable:>20,}{usable / _GIB:>10.2f}")
    dense, experts, second = held_in_all(model, best)
    note = f" (with {second:,} of the embedding's second copy on the last stage)" if second else ""
    return "\n".join([*lines, f"  one copy on all ranks: {dense:,} dense + {experts:,} expert parameters{note}"])


def held_in_all(model: StepModel, best: Proposal) -> tuple[int, int, int]:
    """(dense, expert, repeated) parameters of one copy of the model, added up over the ranks that hold it."""
    size, plan = model.model, best.plan
    dense = experts = 0
    for stage in range(plan.pp):
        held = stage_holding(size, plan, stage)
        whole = sum(size.layers[n].whole for n in held.layers) + (size.d_model if stage == plan.pp - 1 else 0)
        rows = -(-size.vocab_size // plan.tp) * plan.tp - size.vocab_size  # the largest part stands for all parts
        ends = (stage == 0) + (stage == plan.pp - 1 and not (size.tied and stage == 0))
        dense += whole + (held.dense - whole) * plan.tp - rows * size.d_model * ends
        experts += held.experts * plan.ep * plan.etp
    return dense, experts, size.embedding if size.tied and plan.pp > 1 else 0


def _remarks(time: StepTime, words: list[str]) -> list[str]:
    lines = []
    if time.chunks > 1:
        lines.append(f"chunks {time.chunks}: the exchange of one chunk runs while another is computed")
        if not any(word.startswith("overlap.chunks=") for word in words):
            lines.append("this version runs without chunks: --no-overlap predicts what it does today")
    if time.hierarchical:
        lines.append("all-to-all in two hops: many small messages between nodes would cost more than passing them on")
    return lines


def _gains(study: Study, best: Proposal) -> str:
    lines = ["on the trace, one MoE layer and micro-batch", f"  {'':<24}load max/mean   layer ms   shadows"]
    for gain in study.gains(best.plan):
        lines.append(f"  {gain.name:<24}{gain.imbalance:>13.2f}{1e3 * gain.layer_s:>11.3f}{gain.shadows:>10.2f}")
    return "\n".join(lines)


def as_json(model: StepModel, found: Search, study: Study | None, words: list[str]) -> dict[str, Any]:
    """Return the report as one object."""
    best = found.proposals[0]
    dense, experts, second = held_in_all(model, best)
    return {
        "parameters": model.model.parameters,
        "active": model.model.active,
        "ranks": best.plan.world,
        "tried": found.tried,
        "fitting": found.fitting,
        "held": {"dense": dense, "experts": experts, "repeated": second},
        "proposals": [
            {
                **dataclasses.asdict(proposal.plan),
                "dp": proposal.plan.dp,
                "edp": proposal.plan.edp,
                "time": {**dataclasses.asdict(proposal.time), "total_s": proposal.time.total_s},
                "memory": {**dataclasses.asdict(proposal.memory), "total": proposal.memory.total},
                "fullest_stage": proposal.stage,
                "utilization": proposal.utilization,
            }
            for proposal in found.proposals
        ],
        "reasons": list(found.reasons),
        "words": words,
        "balance": [dataclasses.asdict(g) for g in study.gains(best.plan)] if study and best.plan.ep > 1 else None,
        "placement": study.placement(best.plan) if study and best.plan.ep > 1 else None,
    }
