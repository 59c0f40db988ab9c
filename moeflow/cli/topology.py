"""`moeflow topology`: which rank stands where, the groups, and what each rank holds; nothing is started."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from moeflow import logging
from moeflow.cli.arguments import Arguments, add_config_dir, add_verbosity
from moeflow.cli.train import compose_words
from moeflow.schema.layout import AXES, Layout

if TYPE_CHECKING:
    from moeflow.parallel.inventory import Holding
    from moeflow.schema import RunConfig

#: Ranks and groups printed from each end of a long table.
_SHOWN = 8


def arguments() -> Arguments:
    """Return the flags of `moeflow topology`."""
    parser = Arguments("topology")
    parser.flag("--all", action="store_true", help="print every rank and group, however many there are")
    parser.flag("--json", action="store_true", help="print one JSON object")
    add_config_dir(parser)
    add_verbosity(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run `moeflow topology`; returns the exit code."""
    parser = arguments()
    args = parser.read(argv)
    if args.help:
        print(parser.help_text())
        return 0
    logging.setup(args.verbosity)
    config = compose_words(args, None).config
    parallel = config.parallel
    layout = Layout(config.launch.processes, parallel.pp, parallel.tp, parallel.ep, parallel.etp)
    holdings = _holdings(config, layout)
    if args.json:
        print(json.dumps(_as_json(config, layout, holdings)))
    else:
        print(_as_text(config, layout, holdings, layout.world if args.all else _SHOWN))
    return 0


def _holdings(config: RunConfig, layout: Layout) -> list[Holding]:
    import torch

    from moeflow.models import build_model
    from moeflow.parallel.inventory import take_stock
    from moeflow.train.sizes import fill_vocabulary

    fill_vocabulary(config)
    with torch.device("meta"):
        model = build_model(config.model, config.gate)
    return take_stock(model, layout, config.parallel)


def _as_text(config: RunConfig, layout: Layout, holdings: list[Holding], shown: int) -> str:
    experts = config.model.num_experts
    lines = [f"world {layout.world}: {layout.describe()}"]
    if experts:
        lines.append(f"experts: {experts} in each MoE layer in all, {experts // layout.ep} on each rank")
    lines += ["", "rank    " + "".join(f"{axis:>6}" for axis in AXES) + "      parameters   MiB params   MiB training"]
    by_place = {(h.pp_rank, h.tp_rank): h for h in holdings}
    for rank in _ends(range(layout.world), shown):
        if rank is None:
            lines.append(f"...     ({layout.world - 2 * shown:,} more; --all prints them)")
            continue
        held = by_place[layout.coordinate(rank, "pp"), layout.coordinate(rank, "tp")]
        places = "".join(f"{layout.coordinate(rank, axis):>6}" for axis in AXES)
        lines.append(
            f"{rank:<8}{places}{held.parameters:>16,}{held.parameter_bytes / 2**20:>13,.1f}"
            f"{held.training_bytes / 2**20:>15,.1f}"
        )
    lines += ["", "stage  layers  MoE layers  dense parameters  expert parameters  (of one rank)"]
    lines += [
        f"{h.pp_rank:<7}{len(h.layers) or '-':<8}{h.moe_layers:<12}{h.dense:<18,}{h.experts:,}"
        for h in holdings
        if h.tp_rank == 0
    ]
    lines += ["", "groups (ranks that talk to one another)"]
    for axis in AXES:
        if layout.size(axis) == 1:
            lines.append(f"{axis:<5} each rank alone")
            continue
        count = layout.world // layout.size(axis)
        firsts = _first_ranks(layout, axis, shown)
        groups = " ".join(_group_text(layout.group(rank, axis)) for rank in firsts)
        more = f" ... ({count - len(firsts):,} more)" if count > len(firsts) else ""
        lines.append(f"{axis:<5} {groups}{more}")
    lines += ["", "training = parameters + gradients + AdamW's moments in fp32; activations come on top"]
    return "\n".join(lines)


def _ends(items: range, shown: int) -> list[int | None]:
    if len(items) <= 2 * shown:
        return list(items)
    return [*items[:shown], None, *items[-shown:]]


def _first_ranks(layout: Layout, axis: str, limit: int) -> list[int]:
    found: list[int] = []
    for rank in range(layout.world):
        if layout.coordinate(rank, axis) == 0:
            found.append(rank)
            if len(found) == limit:
                break
    return found


def _group_text(group: range) -> str:
    ranks = list(group)
    if len(ranks) > _SHOWN:
        return f"{{{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}}}"
    return f"{{{','.join(map(str, ranks))}}}"


def _as_json(config: RunConfig, layout: Layout, holdings: list[Holding]) -> dict[str, Any]:
    return {
        "world": layout.world,
        **{axis: layout.size(axis) for axis in AXES},
        "num_experts": config.model.num_experts,
        "experts_per_rank": config.model.num_experts // layout.ep,
        "holdings": [
            {
                "pp_rank": h.pp_rank,
                "tp_rank": h.tp_rank,
                "layers": list(h.layers),
                "moe_layers": h.moe_layers,
                "dense_parameters": h.dense,
                "expert_parameters": h.experts,
                "parameter_bytes": h.parameter_bytes,
                "training_bytes": h.training_bytes,
            }
            for h in holdings
        ],
    }
