"""The parts of a report that are text: outcome, configuration, environment, commands, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from moeflow.config.build import flatten
from moeflow.config.changes import ABSENT, differences
from moeflow.config.plain import dump, load
from moeflow.errors import MoeflowError
from moeflow.report.reading import RunData, Series

_BEST = {"eval/accuracy": max, "eval/perplexity": min, "eval/loss": min}


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False, unseen: bool = False
) -> str:
    """An HTML table whose first column heads its rows.

    Args:
        caption: what it holds; read out, and shown above it.
        head: headings of the columns, plain text.
        rows: cells, plain text.
        numbers: whether the cells are figures, to be aligned.
        unseen: whether the caption is read out alone, because a heading says the same.
    """
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    kind = ' class="numbers"' if numbers else ""
    hidden = ' class="unseen"' if unseen else ""
    # It may be wider than a phone: then it scrolls by itself, with the keyboard too.
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table{kind}>'
        f"<caption{hidden}>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def details(summary: str, content: str) -> str:
    """Content that opens on demand."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def value_text(value: Any) -> str:
    """A value of a configuration as a person writes it."""
    if value is ABSENT:
        return "(none)"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else json.dumps(value) if isinstance(value, (list, dict)) else f"{value}"


# --- outcome ---------------------------------------------------------------------------------------------------------


def outcome(runs: Sequence[RunData]) -> str:
    """Runs beside one another: state, steps, last and best figures, speed."""
    columns = [_outcome(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    head = ["", *(f"{run.letter}: {run.name}" if len(runs) > 1 else run.name for run in runs)]
    return table("Outcome", head, [[name, *(column.get(name, "-") for column in columns)] for name in names])


def _outcome(run: RunData) -> dict[str, str]:
    found = {"state": run.state}
    if run.config is not None:
        found["steps"] = f"{run.last_step or 0:,} of {run.config.trainer.max_steps:,}"
    if "data" in run.summary:
        found["data"] = str(run.summary["data"])
    for name in ("loss", "accuracy"):
        if (last := _last(run.series.get(name))) is not None:
            found[f"last training {name}"] = _figure(name, last)
    for name, series in run.series.items():
        if name.startswith("eval/"):
            label = name.removeprefix("eval/")
            if (last := _last(series)) is not None:
                found[f"last evaluation {label}"] = _figure(name, last)
            if name in _BEST and np.isfinite(series.values).any():
                found[f"best evaluation {label}"] = _best(name, series)
    for unit in ("samples", "tokens"):
        speed = run.series.get(f"{unit}_per_s")
        if speed is not None and np.isfinite(speed.values).any():
            found["throughput (median)"] = f"{np.nanmedian(speed.values):,.0f} {unit}/s"
    if "bad_steps" in run.summary:
        found["steps left out as not finite"] = str(run.summary["bad_steps"])
    if run.status.get("error") and run.state == "failed":
        found["error"] = str(run.status["error"])
    return found


def _best(name: str, series: Series) -> str:
    finite = np.isfinite(series.values)
    best = _BEST[name](series.values[finite])
    step = series.steps[finite][series.values[finite] == best][0]
    return f"{_figure(name, float(best))} at step {int(step):,}"


def _last(series: Series | None) -> float | None:
    return None if series is None or not len(series.values) else float(series.values[-1])


def _figure(name: str, value: float) -> str:
    return f"{100 * value:.2f}%" if name.endswith("accuracy") else f"{value:.4g}"


# --- configuration ---------------------------------------------------------------------------------------------------


def configuration(runs: Sequence[RunData]) -> str:
    """What differs between the runs, and for each run what differs from its recipe, and all keys."""
    parts = [_between(runs)] if len(runs) > 1 else []
    for run in runs:
        if len(runs) > 1:
            parts.append(f"<h3>Run {run.letter}: {escape(run.name)}</h3>")
        parts += [_from_recipe(run), _on_resume(run)]
        if run.config is not None:
            parts.append(details("All keys (config.yaml)", f'<pre tabindex="0">{escape(dump(run.config))}</pre>'))
    return "".join(parts)


def _between(runs: Sequence[RunData]) -> str:
    flat = [flatten(run.config) if run.config is not None else {} for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = []
    for key in keys:
        values = [each.get(key, ABSENT) for each in flat]
        if key not in ("run.dir", "run.root") and any(value != values[0] for value in values):
            rows.append([key, *map(value_text, values)])
    if not rows:
        return "<p>The runs have the same configuration.</p>"
    return table("Keys that differ between the runs", ["key", *(run.letter for run in runs)], rows)


def _from_recipe(run: RunData) -> str:
    recipe = run.config.run.recipe if run.config is not None else None
    base = f"recipe {recipe}" if recipe else "the defaults"
    if not run.recipe_diff:
        return f"<p>Nothing differs from {escape(base)}.</p>"
    rows = []
    for key, pair in run.recipe_diff.items():
        known = pair if isinstance(pair, dict) else {"run": pair}
        rows.append([str(key), value_text(known.get("recipe", ABSENT)), value_text(known.get("run", ABSENT))])
    return table(f"Differences from {base}", ["key", recipe or "default", "this run"], rows)


def _on_resume(run: RunData) -> str:
    """Keys that were changed when the run was resumed."""
    parts = []
    olds = sorted(run.path.glob("config.*.yaml"), key=lambda path: path.name.split(".")[1].zfill(9))
    configs = []
    for path in olds:
        try:
            configs.append((path.name, load(path)))
        except MoeflowError as error:
            parts.append(f"<p>{escape(path.name)} cannot be read: {escape(error.what)}</p>")
    if run.config is not None:
        for (name, old), (_, new) in zip(configs, [*configs, ("", run.config)][1:], strict=True):
            changes = [change for change in differences(old, new) if not change.key.startswith("run.")]
            rows = [[change.key, value_text(change.old), value_text(change.new)] for change in changes]
            if rows:
                parts.append(table(f"Changed by a resume (before: {name})", ["key", "before", "after"], rows))
    return "".join(parts)


# --- the rest --------------------------------------------------------------------------------------------------------


def environment(runs: Sequence[RunData]) -> str:
    """Versions and machine of each run, side by side."""
    columns = [_environment(run.env) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    if not names:
        return "<p>env.json is not there.</p>"
    head = ["", *(run.letter if len(runs) > 1 else "this run" for run in runs)]
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    return table("Environment", head, rows, unseen=True)


def _environment(env: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in env.items():
        if name in ("argv", "executable"):
            continue
        if name == "git" and isinstance(value, dict):
            changed = len(value.get("changed_files") or [])
            found["commit"] = str(value.get("commit")) + (f" and {changed} changed files" if changed else "")
        elif isinstance(value, dict):
            found |= {str(key): value_text(item) for key, item in value.items()}
        else:
            found[name] = value_text(value)
    return found


def commands(runs: Sequence[RunData]) -> str:
    """The shell commands that started and resumed each run."""
    parts = []
    for run in runs:
        head = f"<h3>Run {run.letter}</h3>" if len(runs) > 1 else ""
        text = run.commands.strip() or "(command.txt is not there)"
        parts.append(f'{head}<pre class="command" tabindex="0">{escape(text)}</pre>')
    return "".join(parts)


def checkpoints(runs: Sequence[RunData]) -> str:
    """Checkpoints that are still there."""
    parts = []
    for run in runs:
        of = f" of run {run.letter}" if len(runs) > 1 else ""
        if not run.checkpoints:
            parts.append(f"<p>No checkpoint{of}.</p>")
            continue
        rows = []
        for each in run.checkpoints:
            note = each.problem or ("taken by moeflow resume" if each.step == run.latest else "")
            score = next((name for name in _BEST if each.step in _steps(run.series.get(name))), None)
            value = "-" if score is None else _figure(score, _at(run.series[score], each.step))
            rows.append(
                [
                    f"{each.step:,}",
                    "-" if each.size is None else f"{each.size / 2**20:,.1f} MiB",
                    "-" if each.world is None else str(each.world),
                    "-" if score is None else f"{score.removeprefix('eval/')} {value}",
                    note,
                ]
            )
        parts.append(
            table(f"Checkpoints{of}", ["step", "size", "ranks", "evaluation", "note"], rows, unseen=len(runs) == 1)
        )
    return "".join(parts)


def _steps(series: Series | None) -> set[int]:
    return set() if series is None else set(series.steps.tolist())


def _at(series: Series, step: int) -> float:
    return float(series.values[int(np.searchsorted(series.steps, step))])
