"""What the folders of runs tell about them, for lists: no torch, and no more of a long metrics file than its end."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moeflow.config.plain import load
from moeflow.errors import MoeflowError
from moeflow.train import rundir
from moeflow.train.metrics import JSONL
from moeflow.train.rundir import RunDir

#: What a list calls the states of a run.
WORDS = {"interrupted": "stopped", "created": "not begun"}
#: Figures of an evaluation that a list shows, the first that a run has.
SCORES = ("eval/accuracy", "eval/perplexity", "eval/loss")
_TAIL_BYTES = 2**18
_DEPTH = 4


@dataclasses.dataclass(frozen=True, slots=True)
class RunInfo:
    """One run.

    Attributes:
        path: of its folder.
        name: `run.name`, or the recipe's.
        recipe: None where it was made without one.
        state: "not begun", "running", "finished", "stopped", "failed", "killed" or "unknown".
        resumable: whether `moeflow resume` has something to go on with.
        step: last one that was logged or saved; None before the first.
        max_steps: of the configuration; None where it cannot be read.
        checkpoint: step of the latest one.
        loss: last one that was logged.
        scores: last evaluation, {"eval/accuracy": 0.8, ...}.
        created: time, ISO 8601.
        seconds: from its latest start to its last sign of life; None where nothing tells.
        error: why it failed, or why its configuration cannot be read.
    """

    path: Path
    name: str
    recipe: str | None
    state: str
    resumable: bool
    step: int | None
    max_steps: int | None
    checkpoint: int | None
    loss: float | None
    scores: dict[str, float]
    created: str | None
    seconds: float | None
    error: str | None

    @property
    def score(self) -> tuple[str, float] | None:
        """The figure of the last evaluation that a list shows."""
        return next(((name, self.scores[name]) for name in SCORES if name in self.scores), None)


def find_runs(folder: str | os.PathLike[str]) -> list[RunInfo]:
    """Return the runs in a folder and the folders in it, the oldest first; of a run folder, that run alone."""
    found = [describe(RunDir(path)) for path in _run_folders(Path(os.path.abspath(folder)), _DEPTH)]
    return sorted(found, key=lambda info: (_seconds(info.created) or 0.0, info.path.name))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / rundir.CONFIG).is_file():
        yield folder
        return
    if depth == 0:
        return
    try:
        inner = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=depth == _DEPTH)]
    except OSError:
        return
    for path in inner:
        yield from _run_folders(path, depth - 1)


def describe(run: RunDir) -> RunInfo:
    """Return what a run folder tells; a damaged one is told of in `error`."""
    status, error = run.status(), None
    name, recipe, max_steps = run.path.name, None, None
    try:
        config = load(run.config)
        name, recipe = config.run.name or config.run.recipe or name, config.run.recipe
        max_steps = config.trainer.max_steps
    except MoeflowError as problem:
        error = f"its configuration cannot be read: {problem.what}"
    state = str(status.get("state", "unknown"))
    last, loss, scores = _tail(run.metrics_jsonl)
    checkpoint = run.latest_step()
    step = max((number for number in (last, checkpoint) if number is not None), default=None)
    undone = checkpoint is not None and max_steps is not None and checkpoint < max_steps
    return RunInfo(
        path=run.path,
        name=name,
        recipe=recipe,
        state=WORDS.get(state, state),
        resumable=undone and state != "running",
        step=step,
        max_steps=max_steps,
        checkpoint=checkpoint,
        loss=loss,
        scores=scores,
        created=status.get("created"),
        seconds=_duration(run, status),
        error=error or (str(status["error"]) if state == "failed" and status.get("error") else None),
    )


def _tail(path: Path) -> tuple[int | None, float | None, dict[str, float]]:
    """(last step, last loss, last evaluation) from the end of a metrics.jsonl."""
    try:
        with open(path, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
            lines = stream.read().splitlines()
    except OSError:
        return None, None, {}
    step: int | None = None
    loss: float | None = None
    scores: dict[str, float] = {}
    for line in reversed(lines):
        row = _row(line)
        if row is None:
            continue
        step = row["step"] if step is None else step
        loss = _number(row.get("loss")) if loss is None else loss
        scores = scores or {key: n for key in row if key in SCORES and (n := _number(row[key])) is not None}
        if loss is not None and scores:
            break
    return step, loss, scores


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # the first line may be cut, the last one torn
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _number(value: Any) -> float | None:
    """A number of a row; those that JSON has not are texts there."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _duration(run: RunDir, status: Mapping[str, Any]) -> float | None:
    start = _seconds(status.get("begun")) or _seconds(status.get("running"))
    state = status.get("state")
    if start is None or state in (None, "created"):
        return None
    if state == "running":
        end: float | None = datetime.datetime.now().timestamp()
    else:
        end = _seconds(status.get(str(state)))
    if end is None:
        try:
            end = (run.path / JSONL).stat().st_mtime
        except OSError:
            return None
    return max(0.0, end - start) if math.isfinite(end) else None


def _seconds(text: Any) -> float | None:
    try:
        return datetime.datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
