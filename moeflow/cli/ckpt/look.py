"""`moeflow ckpt ls` and `moeflow ckpt verify`: nothing is written, and torch is not needed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from moeflow.cli.resume import step_number
from moeflow.cli.runs import shown
from moeflow.errors import CheckpointError, ConfigError
from moeflow.train import manifest, rundir
from moeflow.train.shelf import Shelf


def ls_(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Print one line for each checkpoint."""
    run, shelf = _open(words)
    steps, latest = shelf.steps(), shelf.latest()
    if not steps:
        print(f"{shown(run.path)} has no checkpoint")
        return 0
    print(f"{'step':>10}  {'size':>9}  {'saved by':<28}  metrics")
    for step in steps:
        try:
            meta, content = shelf.meta(step), manifest.read(shelf.path(step))
            size = sum(int(entry["bytes"]) for entry in content["files"].values())
            line = f"{step:>10}  {_megabytes(size):>9}  {_saved_by(meta):<28}  {_metrics(meta)}"
        except (CheckpointError, AttributeError, TypeError, ValueError, KeyError) as error:
            what = error.what if isinstance(error, CheckpointError) else "its meta.json or manifest is damaged"
            line = f"{step:>10}  damaged: {what}"
        print(line + ("  <- latest" if step == latest else ""))
    return 0


def verify_(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Compare files with the manifests; the exit code tells whether all are good."""
    run, shelf = _open(words)
    wanted = step_number(args.step)
    steps = shelf.steps() if wanted is None else [wanted]
    if not steps:
        raise CheckpointError(f"{shown(run.path)} has no checkpoint")
    damaged = 0
    for step in steps:
        try:
            shelf.faults(step)
            shelf.meta(step)
            print(f"step {step}: good")
        except CheckpointError as error:
            damaged += 1
            print(f"step {step}: {error.what}")
    return CheckpointError.exit_code if damaged else 0


def _open(words: Sequence[str]) -> tuple[rundir.RunDir, Shelf]:
    if len(words) > 1:
        raise ConfigError(f"'{words[1]}': nothing follows the run folder.", "moeflow ckpt --help")
    run = rundir.open(words[0])
    return run, Shelf(run.checkpoints)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _saved_by(meta: dict[str, Any]) -> str:
    origin = meta.get("origin")
    if isinstance(origin, dict):
        return f"moeflow ckpt {origin.get('operation')}"
    layout = meta.get("layout") or {}
    axes = " x ".join(f"{axis}={size}" for axis, size in layout.items() if axis != "world" and size > 1)
    processes = f"{meta.get('world', 1)} process" + ("es" if meta.get("world", 1) > 1 else "")
    return f"{processes}, {axes}" if axes else processes


def _metrics(meta: dict[str, Any]) -> str:
    metrics = meta.get("metrics") or {}
    return ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
