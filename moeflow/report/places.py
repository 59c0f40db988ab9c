"""Which rank holds what, as cards: one block for each pipeline stage, one card for each rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from moeflow.errors import MoeflowError
from moeflow.report.reading import RunData
from moeflow.schema import RunConfig
from moeflow.schema.layout import Layout

# Cards of one stage; a larger stage repeats itself.
_CARDS = 32


def layout_html(run: RunData, many: bool) -> str:
    """The cards of a run; a sentence where its layout cannot be told."""
    head = f"<h3>Run {run.letter}</h3>" if many else ""
    if run.config is None:
        return f"{head}<p>The configuration cannot be read.</p>"
    config = run.config
    parallel = config.parallel
    try:
        layout = Layout(world_of(run, config), parallel.pp, parallel.tp, parallel.ep, parallel.etp)
        layers = _layers_of_stages(config, layout)
    except MoeflowError as error:
        return f"{head}<p>The layout cannot be told: {escape(error.what)}</p>"
    words = f"{layout.world} process{'es' * (layout.world > 1)}: {layout.describe()}; engine {parallel.engine}."
    if config.balance.placement:
        words += " Experts stand where they were at the start; balance.placement moves them."
    stages = "".join(_stage(config, layout, stage, layers.get(stage)) for stage in range(layout.pp))
    return f"{head}<p>{escape(words)}</p>{stages}"


def world_of(run: RunData, config: RunConfig) -> int:
    """Processes of the run: those of the launcher that started it, else `launch.processes`."""
    variables: Mapping[str, Any] = run.env.get("variables") or {}
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"):
        text = str(variables.get(name, ""))
        if text.isdecimal() and int(text) > 0 and name != "SLURM_NTASKS":
            return int(text)
    return config.launch.processes


def _layers_of_stages(config: RunConfig, layout: Layout) -> dict[int, Sequence[str]]:
    """Pipeline stage -> its layers; empty without a pipeline, which needs no look at the model."""
    if layout.pp == 1:
        return {}
    import torch

    from moeflow.models import build_model
    from moeflow.parallel.inventory import take_stock

    shape = copy.copy(config.model)
    if getattr(shape, "vocab_size", 0) is None:
        # Found in the data when the run began; any number cuts the layers nearly alike.
        shape.vocab_size = 256  # type: ignore[attr-defined]
    with torch.device("meta"):
        model = build_model(shape, config.gate)
    return {held.pp_rank: held.layers for held in take_stock(model, layout, config.parallel) if held.tp_rank == 0}


def _stage(config: RunConfig, layout: Layout, stage: int, layers: Sequence[str] | None) -> str:
    ranks = range(stage * layout.stage, (stage + 1) * layout.stage)
    cards = "".join(_card(config, layout, rank) for rank in ranks[:_CARDS])
    more = f'<p class="caption">and {len(ranks) - _CARDS:,} more ranks of this stage</p>' if len(ranks) > _CARDS else ""
    title = f"<h4>Stage {stage}{_layers_text(layers)}</h4>" if layout.pp > 1 else ""
    return f'{title}<ul class="ranks">{cards}</ul>{more}'


def _layers_text(layers: Sequence[str] | None) -> str:
    if not layers:
        return ""
    if len(layers) == 1:
        return f": layer {escape(layers[0])}"
    whole = [int(name) for name in layers if name.isdecimal()]
    if len(whole) == len(layers) and whole == list(range(whole[0], whole[-1] + 1)):
        return f": layers {whole[0]} to {whole[-1]}"
    return ": layers " + ", ".join(map(escape, layers))


def _card(config: RunConfig, layout: Layout, rank: int) -> str:
    lines = []
    experts = config.model.num_experts
    if experts and experts % layout.ep == 0:
        count, place = experts // layout.ep, layout.coordinate(rank, "ep")
        lines.append(f"experts {_span(place * count, count)}")
        if layout.etp > 1:
            lines.append(f"part {layout.coordinate(rank, 'etp') + 1} of {layout.etp} of each")
    if layout.tp > 1:
        lines.append(f"dense part {layout.coordinate(rank, 'tp') + 1} of {layout.tp}")
    else:
        lines.append("all of the dense part" if layout.pp == 1 else "the stage's dense part")
    axes = ", ".join(f"{axis} {layout.coordinate(rank, axis)}" for axis in ("dp", "tp", "ep") if layout.size(axis) > 1)
    tone = layout.coordinate(rank, "ep") % 8
    details = "".join(f"<br>{line}" for line in [*lines, *([axes] if axes else [])])
    return f'<li style="border-color:var(--line{tone})"><b>rank {rank}</b>{details}</li>'


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first} to {first + count - 1}"
