"""Run folders made by hand, for the commands that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moeflow.config.plain import dump
from moeflow.schema import RunConfig
from moeflow.train import rundir
from moeflow.train.rundir import RunDir


def make_run(folder: Path, rows: list[dict[str, Any]] | None = None, **keys: Any) -> RunDir:
    """Make a run folder with metrics rows; `keys` are like trainer__max_steps=10."""
    config = RunConfig()
    config.run.dir = str(folder)
    for key, value in keys.items():
        section, _, name = key.partition("__")
        setattr(getattr(config, section), name, value)
    run = rundir.create(config, dump)
    if rows is not None:
        run.metrics_jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def add_checkpoint(run: RunDir, step: int) -> None:
    """A checkpoint as a list sees it."""
    folder = run.checkpoints / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
