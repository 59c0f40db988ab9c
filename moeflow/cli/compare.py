"""`moeflow compare`: whether two runs are bit-equal, and where they part.

Exit codes: 0 equal, 1 different, others as everywhere.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moeflow.cli.arguments import Arguments
from moeflow.cli.resume import step_number
from moeflow.cli.runs import shown
from moeflow.cli.verbs import VERBS
from moeflow.config.changes import Change, differences
from moeflow.config.plain import load
from moeflow.errors import ConfigError
from moeflow.train import rundir
from moeflow.train.comparison import (
    Difference,
    FilesComparison,
    MetricsComparison,
    compare_files,
    compare_metrics,
)
from moeflow.train.files import json_bytes
from moeflow.train.rundir import RunDir
from moeflow.train.shelf import Shelf

if TYPE_CHECKING:
    from moeflow.train.same_tensors import TensorsComparison

_MOST = 8


@dataclass(slots=True)
class _Checkpoint:
    """One step of which both runs have a checkpoint."""

    files: FilesComparison
    values: TensorsComparison | None  # None where the files tell

    @property
    def equal(self) -> bool:
        return self.files.same_tensors if self.values is None else self.values.equal


def arguments() -> Arguments:
    """Return the flags of `moeflow compare`."""
    parser = Arguments("compare", words="runs")
    parser.flag("--step", metavar="N", help="checkpoint to compare; all that both runs have where left out")
    parser.flag("--no-tensors", action="store_true", help="compare configuration and metrics alone")
    parser.flag("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Compare two runs; returns the exit code."""
    parser = arguments()
    args = parser.read(argv)
    if args.help:
        print(f"{parser.help_text()}\n\nexit codes: 0 equal, 1 different")
        return 0
    if len(args.runs) != 2:
        raise ConfigError(f"moeflow compare takes two run folders, not {len(args.runs)}.", "moeflow ls lists runs")
    a, b = (rundir.open(word) for word in args.runs)
    changes = [change for change in differences(load(a.config), load(b.config)) if not change.key.startswith("run.d")]
    metrics = _metrics(a, b)
    checkpoints = [] if args.no_tensors else _checkpoints(a, b, step_number(args.step))
    equal = (metrics is None or metrics.equal) and all(checkpoint.equal for checkpoint in checkpoints)
    if metrics is None and not checkpoints:
        raise ConfigError("neither run has metrics or a checkpoint yet: there is nothing to compare.", "moeflow ls")
    if args.json:
        print(json_bytes(_plain(equal, changes, metrics, checkpoints)).decode(), end="")
    else:
        lines = [f"A  {shown(a.path)}", f"B  {shown(b.path)}", "", *_configuration(changes), *_figures(metrics)]
        lines += [line for checkpoint in checkpoints for line in _tensors(checkpoint)]
        lines += [] if checkpoints or args.no_tensors else ["checkpoints    none of a common step"]
        verdict = "bit-equal" if equal else _parting(metrics)
        print("\n".join([*lines, "", f"verdict  {verdict}", f"next     {_next(a, b, equal)}"]))
    return 0 if equal else 1


def _metrics(a: RunDir, b: RunDir) -> MetricsComparison | None:
    """None where neither has metrics."""
    there = [run.metrics_jsonl.is_file() for run in (a, b)]
    if not any(there):
        return None
    if not all(there):
        lacking = (a, b)[there.index(False)]
        raise ConfigError(f"{shown(lacking.path)} has no metrics yet.", "wait for its first logged step; moeflow ls")
    return compare_metrics(a.metrics_jsonl, b.metrics_jsonl)


def _checkpoints(a: RunDir, b: RunDir, step: int | None) -> list[_Checkpoint]:
    ours, theirs = Shelf(a.checkpoints), Shelf(b.checkpoints)
    if step is not None:
        ours.path(step), theirs.path(step)  # whichever lacks it says what it has
    steps = sorted(set(ours.steps()) & set(theirs.steps())) if step is None else [step]
    found = []
    for each in steps:
        files, values = compare_files(ours, theirs, each), None
        if not files.same_tensors:
            # Only now: importing torch takes longer than all before.
            from moeflow.train.same_tensors import compare_tensors

            values = compare_tensors(ours.folder, theirs.folder, each)
        found.append(_Checkpoint(files, values))
    return found


# --- text ------------------------------------------------------------------------------------------------------------


def _configuration(changes: list[Change]) -> list[str]:
    if not changes:
        return ["configuration  the same"]
    return ["configuration", *(f"  {change}" for change in changes)]


def _figures(metrics: MetricsComparison | None) -> list[str]:
    if metrics is None:
        return ["metrics        none"]
    rows = f"{metrics.common} step{'s' if metrics.common != 1 else ''} that both logged"
    alone = [
        f"  only {name} logged {_steps(steps)}"
        for name, steps in (("A", metrics.only_a), ("B", metrics.only_b))
        if steps
    ]
    if not metrics.first:
        return [f"metrics        equal in {rows}", *alone]
    lines = [f"metrics        {metrics.differing} of {rows} differ, first step {metrics.first[0].step}:"]
    lines += [f"  {_difference(each)}" for each in metrics.first[:_MOST]]
    if len(metrics.first) > _MOST:
        lines.append(f"  and {len(metrics.first) - _MOST} more")
    measured = [each for each in metrics.largest.values() if each.by is not None]
    largest = sorted(measured, key=lambda each: -_relative(each))[:_MOST]
    if metrics.differing > 1 and largest:
        lines += ["  largest differences:", *(f"    step {each.step}: {_difference(each)}" for each in largest)]
    return [*lines, *alone]


def _difference(each: Difference) -> str:
    by = "" if each.by is None else f"  ({each.by:.3g} apart)"
    return f"{each.key}: {_number(each.a)} | {_number(each.b)}{by}"


def _number(value: float | str | None) -> str:
    return "(none)" if value is None else str(value)


def _relative(each: Difference) -> float:
    scale = max(abs(float(each.a or 0)), abs(float(each.b or 0)))
    return (each.by or 0.0) / scale if scale else 0.0


def _steps(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} more, from step {steps[0]} to {steps[-1]}"


def _tensors(checkpoint: _Checkpoint) -> list[str]:
    files, values = checkpoint.files, checkpoint.values
    label = f"checkpoint     step {files.step}: "
    if values is None:
        return [f"{label}tensors equal, by their checksums"]
    saved = f" (saved by {files.worlds[0]} and {files.worlds[1]} ranks)" if files.worlds[0] != files.worlds[1] else ""
    if values.equal:
        return [f"{label}{values.total} tensors equal, by their values{saved}"]
    lines = [f"{label}{len(values.differing)} of {values.total} tensors differ{saved}"]
    for name, largest in list(values.differing.items())[:_MOST]:
        lines.append(f"  {name}: " + ("another shape or dtype" if largest == float("inf") else f"up to {largest:.3g}"))
    if len(values.differing) > _MOST:
        lines.append(f"  and {len(values.differing) - _MOST} more")
    for run, names in (("A", values.only_a), ("B", values.only_b)):
        if names:
            lines.append(f"  only in {run}: {', '.join(names[:_MOST])}{' ...' if len(names) > _MOST else ''}")
    return lines


def _parting(metrics: MetricsComparison | None) -> str:
    if metrics is None or metrics.equal:
        return "different: their checkpoints differ"
    if metrics.first:
        return f"different from step {metrics.first[0].step} on"
    if metrics.common == 0:
        return "different: no step was logged by both"
    return f"equal in the {metrics.common} steps that both logged; one of them logged more"


def _next(a: RunDir, b: RunDir, equal: bool) -> str:
    first, second = shlex.quote(shown(a.path)), shlex.quote(shown(b.path))
    if not equal and "report" in VERBS:
        return f"moeflow report {first} {second}"
    return f"moeflow eval {second}" if b.latest_step() is not None else "moeflow ls"


def _plain(
    equal: bool, changes: list[Change], metrics: MetricsComparison | None, checkpoints: list[_Checkpoint]
) -> dict[str, Any]:
    return {
        "equal": equal,
        "configuration": [{"key": change.key, "a": str(change.old), "b": str(change.new)} for change in changes],
        "metrics": None if metrics is None else asdict(metrics),
        "checkpoints": [
            {
                **asdict(each.files),
                "equal": each.equal,
                "tensors": None if each.values is None else asdict(each.values),
            }
            for each in checkpoints
        ],
    }
