"""The first lines of a run: what it is about to do, on what, and how."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from moeflow.models import build_model
from moeflow.models.flops import count_parameters
from moeflow.ops import backend
from moeflow.parallel.environment import detect
from moeflow.parallel.parallelize import moe_layers
from moeflow.schema.engines import describe_engine
from moeflow.train.launch import OWN_START
from moeflow.train.session import Session


def banner(session: Session, run_dir: str | Path, resumed_step: int | None) -> list[tuple[str, str]]:
    """Return (label, text) lines.

    Args:
        session: of this process.
        run_dir: of the run.
        resumed_step: of the checkpoint that the run goes on from, if any.
    """
    config, layout = session.config, session.topology.layout
    with torch.device("meta"):
        whole = build_model(config.model, config.gate)
    total, active = count_parameters(whole)
    here, _ = count_parameters(session.model)
    lines = [
        ("device", _device(session)),
        ("processes", _processes(layout.world)),
        ("layout", layout.describe()),
        *([("engine", describe_engine(config))] if config.parallel.engine != "ddp" else []),
        ("precision", config.precision.dtype),
        ("ops", _ops(session.device.type)),
        ("model", f"{config.model.name}: {total:,} parameters, {active:,} active per token; {here:,} on rank 0"),
    ]
    layers = moe_layers(whole)
    if layers:
        lines.append(("experts", _experts(session, len(layers))))
    lines.append(("data", f"{session.data.name} ({session.data.source}), {len(session.data.train):,} training samples"))
    if session.data.notice:
        lines.append(("notice", session.data.notice))
    if resumed_step is not None:
        lines.append(("resumed", f"from step {resumed_step}"))
    return [*lines, ("run", str(run_dir))]


def _device(session: Session) -> str:
    if session.device.type == "cuda":
        return f"{session.device} ({torch.cuda.get_device_name(session.device)})"
    return f"{session.device.type}, {torch.get_num_threads()} threads a process"


def _processes(world: int) -> str:
    launched = detect()
    if launched is None:
        return f"{world}"
    return f"{world}, started by {'moeflow' if OWN_START in os.environ else launched.launcher}"


def _ops(device_type: str) -> str:
    """One line for each (implementation, reason), with the operators that share it."""
    shared: dict[tuple[str, str], list[str]] = {}
    for operator, implementation, reason in backend.describe(device_type):
        shared.setdefault((implementation, reason), []).append(operator)
    return "; ".join(f"{', '.join(names)}: {how} ({why})" for (how, why), names in shared.items())


def _experts(session: Session, num_layers: int) -> str:
    config, ep = session.config, session.topology["ep"].size
    number = config.model.num_experts
    gate = config.gate
    capacity = "dropless" if gate.capacity_factor is None else f"capacity factor {gate.capacity_factor:g}"
    return (
        f"{number} in each of {num_layers} MoE layers, {number // ep} of them on each rank; "
        f"gate {gate.name}, top-{gate.top_k}, {capacity}"
    )
