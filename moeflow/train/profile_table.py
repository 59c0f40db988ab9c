"""The profile of a step as text.

phase            forward  backward     total  share  slowest rank
experts          12.3 ms   24.6 ms   36.9 ms  45.1%       37.2 ms
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moeflow.train.phase_times import ROWS

Rank = Mapping[str, Any]


def table(content: Mapping[str, Any], traces: Path) -> list[str]:
    """Return the lines.

    Args:
        content: of the JSON file beside the traces.
        traces: their folder.
    """
    ranks: Sequence[Rank] = content["ranks"]
    step_s = _mean([rank["step_s"] for rank in ranks])
    lines = [f"profile of {content['steps']} steps up to step {content['step']}, mean over {_count(ranks)}", ""]
    lines += [*_phases(ranks, step_s), "", *_operators(ranks, step_s), ""]
    peaks = [rank["peak_bytes"] for rank in ranks]
    lines += [
        f"step         {1e3 * content['step_s']:.2f} ms by the clock, the slowest rank's",
        f"MFU          {100 * content['mfu']:.1f}% of what a large matrix product reaches here "
        f"({_flops(_mean([rank['peak_flops'] for rank in ranks]))} a rank), "
        f"on {content['active_parameters']:,} active of {content['parameters']:,} parameters",
        f"peak memory  {max(peaks) / 2**20:,.0f} MiB"
        + (f" (rank {peaks.index(max(peaks))}, the most)" if len(peaks) > 1 else "")
        + ("" if content["device"] == "cuda" else ", resident, since the start of the process"),
        f"traces       {_shown(traces / ranks[0]['trace'])}"
        + (f" to rank{len(ranks) - 1}" if len(ranks) > 1 else "")
        + "; open them in https://ui.perfetto.dev",
    ]
    return lines


def _phases(ranks: Sequence[Rank], step_s: float) -> list[str]:
    on_device = any(rank["device_s"] for rank in ranks)
    head = f"{'phase':<18} {'forward':>10} {'backward':>10} {'total':>10} {'share':>6} {'slowest rank':>13}"
    lines = [head + (f" {'kernels':>10}" if on_device else "")]
    forward_sum = backward_sum = 0.0
    for name in ROWS:
        forward = _mean([rank["forward_s"].get(name, 0.0) for rank in ranks])
        backward = _mean([rank["backward_s"].get(name, 0.0) for rank in ranks])
        if not forward and not backward:
            continue
        forward_sum, backward_sum = forward_sum + forward, backward_sum + backward
        most = max(rank["forward_s"].get(name, 0.0) + rank["backward_s"].get(name, 0.0) for rank in ranks)
        kernels = _mean([rank["device_s"].get(name, 0.0) for rank in ranks])
        lines.append(_row(name, forward, backward, step_s) + f" {_ms(most):>13}" + _kernels(kernels, on_device))
    kernels = _mean([sum(rank["device_s"].values()) for rank in ranks])
    most = max(rank["step_s"] for rank in ranks)
    return [
        *lines,
        _row("step", forward_sum, backward_sum, step_s) + f" {_ms(most):>13}" + _kernels(kernels, on_device),
    ]


def _row(name: str, forward: float, backward: float, step_s: float) -> str:
    share = (forward + backward) / step_s
    return f"{name:<18} {_ms(forward):>10} {_ms(backward):>10} {_ms(forward + backward):>10} {share:>6.1%}"


def _kernels(seconds: float, shown: bool) -> str:
    return f" {_ms(seconds):>10}" if shown else ""


def _operators(ranks: Sequence[Rank], step_s: float) -> list[str]:
    rows = ranks[0]["operators"]
    width = min(44, max((len(row["operator"]) for row in rows), default=0))
    lines = [f"{'operators of rank 0':<{width}} {'calls':>7} {'own time':>10} {'share':>6}  phase"]
    for row in rows:
        name = row["operator"] if len(row["operator"]) <= width else row["operator"][: width - 3] + "..."
        share = row["s"] / step_s
        lines.append(f"{name:<{width}} {row['calls']:>7.4g} {_ms(row['s']):>10} {share:>6.1%}  {row['phase']}")
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.1f} GFLOP/s"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _count(ranks: Sequence[Rank]) -> str:
    return f"{len(ranks)} ranks" if len(ranks) > 1 else "one process"


def _shown(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
