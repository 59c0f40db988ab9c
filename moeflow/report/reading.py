"""What a run folder holds, read for a report; whatever is missing or damaged becomes a note, not an error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moeflow.config.plain import load
from moeflow.errors import CheckpointError, MoeflowError
from moeflow.schema import RunConfig
from moeflow.train import manifest
from moeflow.train.rundir import CONFIG, RunDir
from moeflow.train.shelf import Shelf


@dataclass(frozen=True, slots=True)
class Series:
    """One figure over the steps.

    Attributes:
        steps: int64 [N], rising.
        values: float64 [N]; NaN and infinity where the run logged them.
    """

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class LayerHistory:
    """One MoE layer over the steps of experts.jsonl.

    Attributes:
        steps: int64 [N], rising.
        tokens: int64 [N, E], choices of each expert before capacity.
        dropped: float64 [N], share of the choices without room.
        entropy: float64 [N], nats; NaN where the gate has none.
    """

    steps: np.ndarray
    tokens: np.ndarray
    dropped: np.ndarray
    entropy: np.ndarray


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint; `problem` says why its manifest cannot be read.  `size` is in bytes."""

    step: int
    size: int | None = None
    world: int | None = None
    problem: str | None = None


@dataclass(slots=True)
class RunData:
    """All that a report shows of one run.

    Attributes:
        path: of its folder.
        letter: what pictures call it: A, B, ...
        status: of status.json.
        config: None where config.yaml cannot be read.
        series: metric -> values.
        layers: MoE layer -> what its experts got.
        summary: of summary.json.
        profiles: contents of traces/step_N.json.
        checkpoints: rising.
        latest: step of the checkpoint that a resume takes.
        recipe_diff: key -> {"recipe": ..., "run": ...}.
        env: of env.json.
        commands: text of command.txt.
        notes: what was missing or damaged, a sentence each.
    """

    path: Path
    letter: str
    status: dict[str, Any] = field(default_factory=dict)
    config: RunConfig | None = None
    series: dict[str, Series] = field(default_factory=dict)
    layers: dict[str, LayerHistory] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    latest: int | None = None
    recipe_diff: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    commands: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's own name, else the recipe's, else the folder's."""
        run = self.config.run if self.config is not None else None
        return (run and (run.name or run.recipe)) or self.path.name

    @property
    def state(self) -> str:
        """As `moeflow ls` calls it."""
        state = str(self.status.get("state", "unknown"))
        return {"interrupted": "stopped", "created": "not begun"}.get(state, state)

    @property
    def last_step(self) -> int | None:
        """The last one that was logged."""
        return max((int(series.steps[-1]) for series in self.series.values() if len(series.steps)), default=None)


def read_run(run: RunDir, letter: str) -> RunData:
    """Read a run folder."""
    data = RunData(run.path, letter, run.status())
    try:
        data.config = load(run.config)
    except MoeflowError as error:
        data.notes.append(f"{CONFIG} cannot be read: {error.what}")
    rows = _rows(run.metrics_jsonl, data.notes)
    data.series = _series(rows)
    if not data.series:
        data.notes.append("No step has been logged yet.")
    data.layers = _layers(_rows(run.experts_jsonl, data.notes))
    if not data.layers and any(name.startswith("moe/") for name in data.series):
        data.notes.append("experts.jsonl is not there: loads of single experts were not recorded by this run.")
    data.summary = _json(run.summary, data.notes)
    data.env = _json(run.path / "env.json", data.notes)
    data.recipe_diff = _yaml(run.path / "recipe_diff.yaml", data.notes)
    data.commands = run.command.read_text(encoding="utf-8", errors="replace") if run.command.is_file() else ""
    data.profiles = [content for path in sorted(run.traces.glob("step_*.json")) if (content := _json(path, data.notes))]
    data.checkpoints, data.latest = _checkpoints(Shelf(run.checkpoints))
    return data


def _rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Rows of a JSONL file; lines that cannot be read are counted in a note."""
    if not path.is_file():
        return []
    rows, damaged, torn = [], 0, False
    with open(path, "rb") as stream:
        for line in stream:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
            elif not line.endswith(b"\n"):
                torn = True  # a run that still goes on may be in the middle of it
            else:
                damaged += 1
    if damaged:
        notes.append(f"{path.name}: {damaged} damaged line{'s' * (damaged > 1)} left out.")
    if torn:
        notes.append(f"{path.name}: the last line is cut; it was left out.")
    return rows


def _series(rows: Iterable[dict[str, Any]]) -> dict[str, Series]:
    """Numbers by name.  A step that stands there twice keeps its last value."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        step = row["step"]
        for name, value in row.items():
            if name != "step" and (number := as_number(value)) is not None:
                found.setdefault(name, {})[step] = number
    series = {}
    for name, by_step in found.items():
        steps = np.fromiter(by_step, np.int64, len(by_step))
        values = np.fromiter(by_step.values(), np.float64, len(by_step))
        order = np.argsort(steps, kind="stable")
        series[name] = Series(steps[order], values[order])
    return series


def as_number(value: Any) -> float | None:
    """A number of a row; those that JSON has not are texts there."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _layers(rows: Iterable[dict[str, Any]]) -> dict[str, LayerHistory]:
    found: dict[str, dict[int, tuple[list[int], float, float]]] = {}
    for row in rows:
        layers = row.get("layers")
        for name, layer in layers.items() if isinstance(layers, dict) else ():
            try:
                tokens = [int(count) for count in layer["tokens"]]
                entropy = as_number(layer.get("entropy"))
                share = float(layer["dropped"]) / max(sum(tokens), 1)
            except (TypeError, ValueError, KeyError, AttributeError):
                continue
            found.setdefault(name, {})[row["step"]] = (tokens, share, math.nan if entropy is None else entropy)
    return {name: _history(by_step) for name, by_step in found.items() if by_step}


def _history(by_step: dict[int, tuple[list[int], float, float]]) -> LayerHistory:
    # A checkpoint with another number of experts may have been taken over: the latest number is shown.
    last = max(by_step)
    width = len(by_step[last][0])
    steps = sorted(step for step, (tokens, _, _) in by_step.items() if len(tokens) == width)
    return LayerHistory(
        np.array(steps, np.int64),
        np.array([by_step[step][0] for step in steps], np.int64),
        np.array([by_step[step][1] for step in steps]),
        np.array([by_step[step][2] for step in steps]),
    )


def _json(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
        return {}
    return content if isinstance(content, dict) else {}


def _yaml(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
        return {}
    return content if isinstance(content, dict) else {}


def _checkpoints(shelf: Shelf) -> tuple[list[Checkpoint], int | None]:
    found = []
    for step in shelf.steps():
        try:
            content = manifest.read(shelf.path(step))
            size = sum(int(entry["bytes"]) for entry in content["files"].values())
            found.append(Checkpoint(step, size, int(content["world"])))
        except CheckpointError as error:
            # The path is long, and the table says the step.
            found.append(Checkpoint(step, problem=f"damaged: {error.what.rpartition(': ')[2]}"))
    return found, shelf.latest()
