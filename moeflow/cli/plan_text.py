"""What a run would be, in a few lines, for --dry-run and `moeflow check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moeflow.config.changes import Change, differences
from moeflow.schema import RunConfig
from moeflow.train.rundir import NO_RECIPE

if TYPE_CHECKING:
    from moeflow.config.composition import Composition


def plan_text(composition: Composition, world: int | None = None) -> str:
    """Return the lines.

    Args:
        composition: the checked run.
        world: number of processes where a launcher has fixed it.
    """
    config = composition.config
    rows = [
        ("recipe", composition.recipe or "none"),
        ("model", f"{config.model.name}, data {config.data.name} ({config.data.source}), gate {config.gate.name}"),
        ("layout", layout_text(config, config.launch.processes if world is None else world)),
        ("experts", _experts_text(config)),
        ("batch", _batch_text(config, config.launch.processes if world is None else world)),
        (
            "steps",
            f"{config.trainer.max_steps}{_every('evaluation', config.trainer.eval_every)}"
            f"{_every('checkpoint', config.checkpoint.every)}",
        ),
        ("run folder", config.run.dir or str(Path(config.run.root) / (config.run.recipe or NO_RECIPE) / "TIME-ID")),
    ]
    lines = [f"{name:<11} {text}" for name, text in rows]
    for number, change in enumerate(_changes(composition)):
        lines.append(f"{'changed' if number == 0 else '':<11} {change}")
    return "\n".join([*lines, "nothing was started or written"])


def layout_text(config: RunConfig, world: int) -> str:
    """Return the layout of the processes as one line."""
    p = config.parallel
    dp = world // (p.pp * p.tp)
    edp = dp * p.tp // (p.ep * p.etp)
    return f"{world} processes = pp {p.pp} x dp {dp} x tp {p.tp}; experts: edp {edp} x ep {p.ep} x etp {p.etp}"


def _experts_text(config: RunConfig) -> str:
    experts = config.model.num_experts
    if experts == 0:
        return "none: every MoE layer is a plain MLP"
    return (
        f"{experts} in each MoE layer, {experts // config.parallel.ep} on each rank, {config.gate.top_k} for each token"
    )


def _batch_text(config: RunConfig, world: int) -> str:
    dp = world // (config.parallel.pp * config.parallel.tp)
    accum = config.trainer.grad_accum
    each = config.data.batch_size // (dp * accum)
    return f"{config.data.batch_size} samples a step = {dp} data ranks x {accum} micro-batches x {each}"


def _every(what: str, steps: int) -> str:
    return f", {what} every {steps}" if steps else f", {what} at the end"


def _changes(composition: Composition) -> list[Change]:
    from moeflow.config.composition import compose_run

    if composition.recipe is None:
        return []
    base = compose_run([f"+recipe={composition.recipe}"], composition.config_dirs, rules=False).config
    return differences(base, composition.config)
