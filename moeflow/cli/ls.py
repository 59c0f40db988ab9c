"""`moeflow ls`: the runs in a folder, the newest last."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from moeflow.cli.arguments import Arguments
from moeflow.cli.catalog import RunInfo, find_runs
from moeflow.cli.runs import shown
from moeflow.cli.verbs import VERBS
from moeflow.errors import ConfigError, did_you_mean
from moeflow.train.duration import format_duration
from moeflow.train.files import json_bytes

ROOT = "outputs"
_HEAD = ("run", "recipe", "status", "step", "loss", "eval", "time")


def arguments() -> Arguments:
    """Return the flags of `moeflow ls`."""
    parser = Arguments("ls", words="folders")
    parser.flag("--json", action="store_true", help="print a JSON list, with every figure of each run")
    parser.flag("--recipe", metavar="NAME", help="runs of this recipe alone")
    parser.flag("--status", metavar="WORD", help="runs of this status alone: running, finished, stopped, failed, ...")
    return parser


def main(argv: list[str]) -> int:
    """Print the runs; returns the exit code."""
    parser = arguments()
    args = parser.read(argv)
    if args.help:
        print(parser.help_text())
        return 0
    folders = args.folders or [ROOT]
    found = [info for folder in folders for info in find_runs(_existing(folder, bool(args.folders)))]
    chosen = [
        info
        for info in found
        if (args.recipe is None or info.recipe == args.recipe) and (args.status is None or info.state == args.status)
    ]
    if args.status is not None and not chosen:
        _check_status(args.status)
    if args.json:
        print(json_bytes([_plain(info) for info in chosen]).decode(), end="")
        return 0
    if not chosen:
        print(f"no run{'' if not found else ' of that kind'} in {', '.join(map(shlex.quote, folders))}")
        print("next  moeflow recipes" if not found else "next  moeflow ls")
        return 0
    print("\n".join([*_table(chosen), *_notes(chosen), f"next  {_next(chosen)}"]))
    return 0


def _existing(folder: str, named: bool) -> Path:
    path = Path(folder)
    if named and not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"moeflow ls: {folder} {state}.", "moeflow ls FOLDER, or moeflow ls for those in outputs")
    return path


def _check_status(word: str) -> None:
    known = ("not begun", "running", "finished", "stopped", "failed", "killed", "unknown")
    if word not in known:
        raise ConfigError(f"moeflow ls: no run has the status '{word}'.{did_you_mean(word, known)}", "moeflow ls")


def _plain(info: RunInfo) -> dict[str, object]:
    return {**dataclasses.asdict(info), "path": str(info.path)}


def _table(infos: Sequence[RunInfo]) -> list[str]:
    rows = [_HEAD, *(_row(info) for info in infos)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    right = {3, 4, 6}
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _row(info: RunInfo) -> tuple[str, ...]:
    return (
        shlex.quote(shown(info.path)),
        info.recipe or "-",
        info.state + (" (resumable)" if info.resumable else ""),
        f"{'-' if info.step is None else info.step}/{'?' if info.max_steps is None else info.max_steps}",
        "-" if info.loss is None else f"{info.loss:.4g}",
        _score(info),
        "-" if info.seconds is None else format_duration(info.seconds),
    )


def _score(info: RunInfo) -> str:
    if info.score is None:
        return "-"
    name, value = info.score
    name = name.removeprefix("eval/")
    return f"{name} {100 * value:.2f}%" if name == "accuracy" else f"{name} {value:.4g}"


def _notes(infos: Sequence[RunInfo]) -> list[str]:
    notes = [f"{shlex.quote(shown(info.path))}: {info.error}" for info in infos if info.error]
    return ["", *notes, ""] if notes else [""]


def _next(infos: Sequence[RunInfo]) -> str:
    """The command that fits the newest run."""
    newest = infos[-1]
    path = shlex.quote(shown(newest.path))
    if newest.resumable:
        return f"moeflow resume {path}"
    if len(infos) > 1 and newest.state == "finished":
        return f"moeflow compare {shlex.quote(shown(infos[-2].path))} {path}"
    if "report" in VERBS and newest.step is not None:
        return f"moeflow report {path}"
    return f"moeflow eval {path}" if newest.checkpoint is not None else "moeflow recipes"
