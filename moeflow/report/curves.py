"""Which figures of metrics.jsonl go into which chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moeflow.report.phases import measured_layers
from moeflow.report.pictures import Chart, Line, Picture
from moeflow.report.reading import RunData
from moeflow.report.thinning import thin

#: Wall-clock time and what is worth nothing as a curve.
_LEFT_OUT = {"epoch", "time", "time_s", "eta_s", "eval_s"}
# Figures with few points get dots.
_MARKED_UP_TO = {True: 60, False: 12}


@dataclass(frozen=True)
class _Kind:
    """One chart: figures that share it, in order."""

    key: str
    title: str
    names: tuple[str, ...]
    unit: str = ""
    note: str = ""
    percent: bool = False
    from_zero: bool = False
    labels: tuple[str, ...] = ()


_TRAINING = (
    _Kind("loss", "Loss", ("loss", "eval/loss"), "loss"),
    _Kind("accuracy", "Accuracy", ("accuracy", "eval/accuracy"), percent=True),
    _Kind("perplexity", "Perplexity", ("perplexity", "eval/perplexity")),
    _Kind("learning_rate", "Learning rate", ("lr",), from_zero=True),
    _Kind("throughput", "Throughput", ("samples_per_s",), "samples/s", from_zero=True),
    _Kind("throughput", "Throughput", ("tokens_per_s",), "tokens/s", from_zero=True),
    _Kind("gradient_norm", "Gradient norm", ("grad_norm",), note="Before clipping.", from_zero=True),
)
_EXPERTS = (
    _Kind(
        "imbalance",
        "Imbalance of the experts",
        ("moe/imbalance",),
        "largest / mean load",
        "Largest load of an expert over the mean load, mean over the layers; 1 is balanced.",
    ),
    _Kind(
        "dropped",
        "Dropped tokens",
        ("moe/dropped",),
        "",
        "Share of the choices for which experts had no room, mean over the layers.",
        percent=True,
        from_zero=True,
    ),
    _Kind(
        "gate_entropy",
        "Gate entropy",
        ("moe/entropy",),
        "nats",
        "Mean entropy of the gate's probabilities; the logarithm of the number of experts is an even choice.",
    ),
    _Kind(
        "idle_experts",
        "Experts without a token",
        ("moe/dead",),
        "experts",
        "Summed over the layers, in the step that was logged.",
        from_zero=True,
    ),
)
_BALANCE = (
    _Kind(
        "balance_imbalance",
        "Imbalance of the ranks",
        ("balance/imbalance", "balance/imbalance_before"),
        "busiest / mean rows",
        "Rows of the busiest rank over the mean, as they were computed, and as they would have been without balance.",
        labels=("with balance", "without"),
    ),
    _Kind("balance_shadowed", "Shadowed experts", ("balance/shadowed",), "experts", "Mean over the layers.",
          from_zero=True),
    _Kind("balance_migrations", "Experts that changed their rank", ("balance/migrations",), "experts",
          "Since the logged step before, summed over the layers.", from_zero=True),
    _Kind("balance_bytes", "Bytes sent by a rank", ("balance/bytes_sent",), "bytes",
          "Rows and shadows of one micro-batch, forward and backward, summed over the layers.", from_zero=True),
)  # fmt: skip
_ALL = (*_TRAINING, *_EXPERTS, *_BALANCE)


def training_pictures(runs: Sequence[RunData]) -> list[Picture]:
    """Loss, accuracy, learning rate, throughput and whatever else of training and evaluation was logged."""
    known = {name for kind in _ALL for name in kind.names}
    others = [name for name in _names(runs) if name not in known and not name.startswith("moe/") and _is_other(name)]
    plain = [name for name in others if not name.startswith("eval/")]
    alone = [name for name in others if name.startswith("eval/") and name.removeprefix("eval/") not in plain]
    kinds = [_Kind(_file_name(name), name, (name, f"eval/{name}")) for name in plain]
    kinds += [_Kind(_file_name(name), name, (name,)) for name in alone]
    return _pictures(runs, [*_TRAINING, *kinds])


def expert_pictures(runs: Sequence[RunData]) -> list[Picture]:
    """Imbalance, dropped tokens, entropy, auxiliary losses, and what balance at run time did."""
    known = {name for kind in _EXPERTS for name in kind.names}
    names = [name for name in _names(runs) if name.startswith("moe/") and name not in known]
    kinds = [
        _Kind(_file_name(name), name.removeprefix("moe/").replace("_", " ").capitalize() + " loss", (name,), "",
              "Auxiliary loss before its coefficient, mean over the layers.")
        for name in names
    ]  # fmt: skip
    return _pictures(runs, [*_EXPERTS, *kinds, *_BALANCE])


def predicted_names(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """(predicted, measured) figures: their names differ in that word alone; the second may not have been logged."""
    return [(name, name.replace("predicted", "measured")) for name in sorted(_names(runs)) if "predicted" in name]


def predicted_pictures(runs: Sequence[RunData]) -> list[Picture]:
    """What the cost model predicted beside what was measured."""
    runs = [_with_measured(run) for run in runs]
    there = set(_names(runs))
    kinds = [
        _Kind(
            _file_name(predicted),
            "Predicted and measured time of the MoE layers" if predicted == _PREDICTED else f"{predicted} and measured",
            (measured, predicted),
            "s" if predicted.endswith("_s") else "",
            "What the cost model predicted"
            + (", beside what was measured." if measured in there else "; nothing was measured.")
            + (_PROFILED if predicted == _PREDICTED else "")
            + _error_text(runs, predicted, measured),
            from_zero=True,
            labels=("measured", "predicted"),
        )
        for predicted, measured in predicted_names(runs)
    ]
    return _pictures(runs, kinds)


_PREDICTED, _MEASURED = "balance/predicted_s", "balance/measured_s"
_PROFILED = " One micro-batch, forward and backward; a run with trainer.profile_steps measures it."


def _with_measured(run: RunData) -> RunData:
    """The run with the layers' time from its profiles, where it was predicted."""
    if _PREDICTED not in run.series or _MEASURED in run.series:
        return run
    measured = measured_layers(run)
    return run if measured is None else replace(run, series=run.series | {_MEASURED: measured})


def _error_text(runs: Iterable[RunData], predicted: str, measured: str) -> str:
    parts = []
    for run in runs:
        if predicted in run.series and measured in run.series:
            _, ours, theirs = np.intersect1d(
                run.series[predicted].steps, run.series[measured].steps, return_indices=True
            )
            truth = run.series[measured].values[theirs]
            good = np.isfinite(truth) & (truth > 0)
            if good.any():
                off = np.median(np.abs(run.series[predicted].values[ours][good] / truth[good] - 1))
                parts.append(f" Run {run.letter}: half of the predictions are within {100 * off:.0f}%.")
    return "".join(parts)


def _is_other(name: str) -> bool:
    return name not in _LEFT_OUT and "predicted" not in name and "measured" not in name


def _names(runs: Iterable[RunData]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.series))


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _pictures(runs: Sequence[RunData], kinds: Iterable[_Kind]) -> list[Picture]:
    pictures, used = [], set()
    for kind in kinds:
        lines = [line for run in runs for line in _lines(run, kind, many=len(runs) > 1)]
        if not lines:
            continue
        key = kind.key if kind.key not in used else _file_name(f"{kind.key}_{kind.names[0]}")
        used.add(key)
        pictures.append(
            Chart(key, kind.title, lines, kind.unit, kind.note, kind.percent, kind.from_zero).picture()
        )  # fmt: skip
    return pictures


def _lines(run: RunData, kind: _Kind, many: bool) -> list[Line]:
    """One line for each figure of the chart that the run has; runs differ in color, figures in dashes."""
    place = ord(run.letter) - ord("A")
    lines = []
    for number, name in enumerate(kind.names):
        series = run.series.get(name)
        if series is None or not np.isfinite(series.values).any():
            continue
        lines.append(
            Line(
                _label(run, name, kind, many),
                thin(series),
                place if many else number,
                number if not many else (place + 2 * number),
                len(series.steps) <= _MARKED_UP_TO[name.startswith("eval/")],
            )
        )
    return lines


def _label(run: RunData, name: str, kind: _Kind, many: bool) -> str:
    what = kind.labels[kind.names.index(name)] if kind.labels else "evaluation" if name.startswith("eval/") else ""
    if many:
        return f"{run.letter} {what}".strip()
    return what or ("training" if len(kind.names) > 1 else kind.title)
