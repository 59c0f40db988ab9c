"""Where a run came from: the exact command, versions, machine and commit, without importing any of the libraries."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import moeflow

_PACKAGES = (
    "torch",
    "accelerate",
    "hydra-core",
    "omegaconf",
    "numpy",
    "safetensors",
    "deepspeed",
    "transformers",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "tensorboard",
    "wandb",
)
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_PREFIXES = ("MOEFLOW_", "NCCL_", "GLOO_", "OMPI_COMM_WORLD_SIZE", "SLURM_JOB_ID", "SLURM_NTASKS")


def command_line() -> str:
    """Return the shell command that started this process."""
    name = Path(sys.argv[0]).name
    if name == "moeflow":
        return shlex.join(["moeflow", *sys.argv[1:]])
    if name == "__main__.py":
        return shlex.join(["python", "-m", "moeflow", *sys.argv[1:]])
    return shlex.join(sys.orig_argv)


def command_text() -> str:
    """Return the command with a comment that says when and where it was given, as command.txt holds it."""
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return f"# {now} in {shlex.quote(os.getcwd())}\n{command_line()}\n"


def environment() -> dict[str, Any]:
    """Return the facts that env.json holds."""
    return {
        "moeflow": moeflow.__version__,
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "cpu_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "git": _git_commit(Path(moeflow.__file__).resolve().parent.parent),
        "cwd": os.getcwd(),
        "argv": sys.orig_argv,
        "executable": sys.executable,
        "variables": {
            key: value for key, value in sorted(os.environ.items()) if key in _VARIABLES or key.startswith(_PREFIXES)
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _git_commit(checkout: Path) -> dict[str, Any] | None:
    """Return commit and whether files differ from it, when moeflow runs from a checkout and git is there."""
    if not (checkout / ".git").exists():
        return None
    try:
        commit = _git(checkout, "rev-parse", "HEAD")
        changed = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed_files": [line[3:] for line in changed.splitlines()]}


def _git(checkout: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.rstrip()
