"""Runs the trials, each in a process of its own with a time limit, and turns what they leave into findings."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moeflow.cli.doctor.finding import Finding
from moeflow.cli.doctor.surroundings import LAUNCHER_VARIABLES

GROUP = "what works"
MODULE = "moeflow.cli.doctor.trials"
MARK = "trial-result "
AT_ONCE = 2  # each imports torch, which is what takes its time


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One trial.

    Attributes:
        name: in `trials.TRIALS`.
        title: in the report.
        needed: training on CPU needs it.
        mends: (pattern of the output, mend), the first that matches counts.
        gpu: tried only where torch sees a GPU.
        extra: extra of moeflow that brings it; without it installed the trial is a note, not a failure.
    """

    name: str
    title: str
    needed: bool = False
    mends: tuple[tuple[str, str], ...] = ()
    gpu: bool = False
    extra: str | None = None


_GLOO_MENDS = (
    (r"[Uu]nable to find interface|[Uu]nable to find address for|No such device", "unset GLOO_SOCKET_IFNAME"),
    (r"resolve|getaddrinfo|[Nn]ame or service", "export GLOO_SOCKET_IFNAME=lo   (or the interface between machines)"),
    (r"[Tt]imed? ?out", "export GLOO_SOCKET_IFNAME=lo; a firewall may block the loopback interface too"),
)
_TORCH = Trial("torch", "torch", needed=True, mends=((r"No module named", 'pip install "torch>=2.9"'),))
REST = (
    Trial("config", "configuration", needed=True, mends=((r"No module named", "pip install -e ."),)),
    Trial("layer", "MoE layer", needed=True),
    Trial("accelerate", "Accelerate", needed=True, mends=((r"No module named", "pip install accelerate"),)),
    Trial("gloo", "gloo", needed=True, mends=_GLOO_MENDS),
    Trial(
        "nccl",
        "NCCL",
        gpu=True,
        mends=(
            (r"[Nn]o socket interface|Bootstrap", "unset NCCL_SOCKET_IFNAME"),
            (r"shm|No space left", "mount -o remount,size=2G /dev/shm"),
            (r"", "NCCL_DEBUG=INFO python -m moeflow.cli.doctor.trials nccl"),
        ),
    ),
    Trial(
        "cupy",
        "CuPy",
        gpu=True,
        extra="cuda12",
        mends=(
            (r"libnvrtc|NVRTC", "pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12   (for CUDA 13: -cu13)"),
            (r"driver version is insufficient", 'pip uninstall -y cupy-cuda13x; pip install "moeflow[cuda12]"'),
        ),
    ),
    Trial(
        "nvrtc",
        "NVRTC",
        extra="cuda12",
        mends=((r"libnvrtc|cuda_bf16", "pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"),),
    ),
    Trial(
        "deepspeed",
        "DeepSpeed",
        extra="deepspeed",
        mends=(
            (r"CUDA_HOME|nvcc", "export DS_ACCELERATOR=cpu"),
            (r"", "pip install --force-reinstall --no-deps --no-build-isolation deepspeed"),
        ),
    ),
    Trial("trackers", "trackers", extra="tensorboard"),
    Trial("data", "data"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a trial's process left.

    Attributes:
        result: the JSON that it printed; None when it failed.
        output: stdout and stderr.
        seconds: it took.
        late: it ran into the time limit.
    """

    result: dict[str, Any] | None
    output: str
    seconds: float
    late: bool = False


def attempt(name: str, limit_s: float) -> Outcome:
    """Run one trial in a process of its own; all that it started ends with it."""
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    if name == "deepspeed":
        environment.setdefault("DS_ACCELERATOR", "cpu")
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, name],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        late = False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        late = True
    marked = [line for line in output.splitlines() if line.startswith(MARK)]
    result = json.loads(marked[-1][len(MARK) :]) if marked and process.returncode == 0 else None
    return Outcome(result, output, time.monotonic() - start, late)


def judge(trial: Trial, outcome: Outcome, limit_s: float) -> Finding:
    """Turn what a trial left into a finding."""
    if outcome.result is not None:
        status = "warn" if outcome.result.get("found") is False else "ok"
        detail = f"{outcome.result['detail']} ({outcome.seconds:.1f} s)"
        mend = "moeflow train ... data.root=FOLDER   (or: export MOEFLOW_DATA=FOLDER)" if status == "warn" else None
        return Finding(GROUP, trial.title, status, detail, mend)  # type: ignore[arg-type]
    missing = re.search(r"No module named '([\w.]+)'", outcome.output)
    if trial.extra is not None and missing:
        mend = f'pip install "moeflow[{trial.extra}]"' + (" --no-build-isolation" if trial.extra == "deepspeed" else "")
        return Finding(GROUP, trial.title, "note", f"{missing.group(1)} is not installed", mend)
    again = f"python -m {MODULE} {trial.name}"
    if outcome.late:
        reason, mend = f"not done after {limit_s:g} s", f"{again}   (shows where it stays)"
        if trial.name == "gloo":
            mend = f"export GLOO_SOCKET_IFNAME=lo; {again}"
    else:
        reason = _last_words(outcome.output)
        mend = next((mend for pattern, mend in trial.mends if re.search(pattern, outcome.output)), again)
    return Finding(GROUP, trial.title, "fault" if trial.needed else "warn", reason, mend)


def _last_words(output: str) -> str:
    """The line of a traceback that says what happened."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return (errors or lines or ["it ended without a word"])[-1][:300]


def try_all(
    limit_s: float, progress: Callable[[str], None], run: Callable[[str, float], Outcome] = attempt
) -> tuple[list[Finding], dict[str, Any] | None]:
    """Try everything.

    Args:
        limit_s: seconds for each trial.
        progress: called with the title of a trial when it begins.
        run: runs one trial.

    Returns:
        The findings, and what the torch trial reported (None when torch does not work; the other trials, which all
        need it, are then left out).
    """
    progress(_TORCH.title)
    first = run(_TORCH.name, limit_s)
    findings = [judge(_TORCH, first, limit_s)]
    if first.result is None:
        return findings, None
    wanted = [_fitting(trial, first.result) for trial in REST if not trial.gpu or first.result["devices"]]

    def one(trial: Trial) -> Finding:
        progress(trial.title)
        return judge(trial, run(trial.name, limit_s), limit_s)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        findings += pool.map(one, wanted)
    return findings, first.result


def _fitting(trial: Trial, torch: dict[str, Any]) -> Trial:
    """CuPy comes in one build for each major version of CUDA: name the one that torch uses."""
    if trial.name == "cupy" and str(torch["cuda"]).startswith("13"):
        return dataclasses.replace(trial, extra="cuda13")
    return trial
