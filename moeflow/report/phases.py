"""Time per phase of a step, from the tables that profiled runs leave in traces/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moeflow.report import theme
from moeflow.report.pictures import Picture
from moeflow.report.reading import RunData, Series
from moeflow.report.theme import Palette

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Phases = list[tuple[str, float, float]]
# Those that the cost model of a layer counts.
_LAYER = {"dispatch", "all-to-all", "experts", "combine"}


def phase_pictures(runs: Sequence[RunData]) -> list[Picture]:
    """One picture for the latest profile of each run."""
    many = len(runs) > 1
    pictures = []
    for run in runs:
        for content in reversed(run.profiles):
            phases = phases_of(content)
            if phases:
                pictures.append(_picture(run, content, phases, many))
                break
    return pictures


def phases_of(content: Mapping[str, Any]) -> Phases:
    """(phase, seconds forward, seconds backward) of a profile, means over the ranks; [] where it is of another form."""
    try:
        ranks = content["ranks"]
        names = dict.fromkeys(name for rank in ranks for way in ("forward_s", "backward_s") for name in rank[way])
        found = [(str(name), _mean(ranks, "forward_s", name), _mean(ranks, "backward_s", name)) for name in names]
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return []
    return [(name, forward, backward) for name, forward, backward in found if forward or backward]


def _mean(ranks: Sequence[Mapping[str, Any]], way: str, name: str) -> float:
    return sum(float(rank[way].get(name, 0.0)) for rank in ranks) / len(ranks)


def measured_layers(run: RunData) -> Series | None:
    """Seconds of the MoE layers in one micro-batch, of each profile: what `balance/predicted_s` predicts."""
    if run.config is None:
        return None
    pipeline = (run.config.parallel.pp_microbatches or run.config.parallel.pp) if run.config.parallel.pp > 1 else 1
    parts = run.config.trainer.grad_accum * pipeline
    found = {}
    for content in run.profiles:
        seconds = [forward + backward for name, forward, backward in phases_of(content) if name in _LAYER]
        if seconds and isinstance(content.get("step"), int):
            found[content["step"]] = sum(seconds) / parts
    steps = sorted(found)
    return Series(np.array(steps, np.int64), np.array([found[step] for step in steps])) if steps else None


def _picture(run: RunData, content: Mapping[str, Any], phases: Phases, many: bool) -> Picture:
    whole = sum(forward + backward for _, forward, backward in phases)
    rows = [
        [name, _ms(forward), _ms(backward), _ms(forward + backward), f"{(forward + backward) / whole:.1%}"]
        for name, forward, backward in phases
    ]
    count = len(content["ranks"])
    caption = f"Mean of {content.get('steps', '?')} profiled steps up to step {content.get('step', '?')}"
    caption += f" over {count} ranks." if count > 1 else "."
    caption += _utilization(content)
    longest = max(phases, key=lambda phase: phase[1] + phase[2])
    return Picture(
        f"phases_{run.letter}" if many else "phases",
        "Time of a step by phase" + (f", run {run.letter}" if many else ""),
        caption,
        f"Time of a step by phase; {longest[0]} takes the most, {(longest[1] + longest[2]) / whole:.0%}",
        partial(_draw, phases),
        table=(["phase", "forward", "backward", "total", "share"], rows),
    )


def _utilization(content: Mapping[str, Any]) -> str:
    try:
        return f" {100 * float(content['mfu']):.1f}% of what a large matrix product reaches there (MFU)."
    except (KeyError, TypeError, ValueError):
        return ""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


def _draw(phases: Phases, palette: Palette) -> Figure:
    figure = theme.new_figure(60.0 + 22.0 * len(phases))
    axes = figure.add_subplot()
    theme.style_axes(axes, palette)
    axes.grid(visible=False, axis="y")
    names = [name for name, _, _ in phases]
    forward = [1e3 * seconds for _, seconds, _ in phases]
    backward = [1e3 * seconds for _, _, seconds in phases]
    axes.barh(names, forward, color=palette.line(0), height=0.65, label="forward")
    axes.barh(names, backward, left=forward, color=palette.line(1), height=0.65, hatch="///", label="backward",
              edgecolor=palette["paper"], linewidth=0)  # fmt: skip
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step")
    theme.add_legend(figure, palette, ["forward", "backward"])
    return figure
