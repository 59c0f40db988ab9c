"""Runs of the command line in processes of their own, for the tests of training."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moeflow.train.metrics import read_rows, without_timing
from tests.distributed import LAUNCHER_VARIABLES, run_ranks

# Small enough for a second, and without disk or network.
TINY = [
    "data.source=synthetic",
    "data.train_samples=192",
    "data.eval_samples=64",
    "data.batch_size=32",
    "data.eval_batch_size=64",
    "trainer.log_every=1",
    "launch.device=cpu",
    "launch.timeout_s=60",
]


def environment() -> dict[str, str]:
    """Without a launcher's variables, and with one thread."""
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    return {**env, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Done:
    """What a run of the command line left."""

    returncode: int
    stdout: str
    stderr: str


def _call(words: tuple[str, ...], folder: str) -> int:
    """The command line in this process, which was forked from one that has imported torch already."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    from moeflow.cli.main import main

    code = main(list(words))
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def moeflow(*words: str, check: bool = True, timeout: float = 120.0) -> Done:
    """Run the command line in a process of its own and wait for it."""
    with tempfile.TemporaryDirectory() as folder:
        (code,) = run_ranks(_call, 1, words, folder, timeout=timeout, init=False)
        done = Done(code, *(Path(folder, name).read_text() for name in ("stdout", "stderr")))
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def train(folder: Path, *words: str, recipe: str = "cifar_tutorial_moe", **more) -> Done:
    """Train the recipe's model in `folder`, tiny unless the words say otherwise, on one process."""
    layout = ["launch.processes=1", "parallel.ep=1"]
    return moeflow("train", f"+recipe={recipe}", *TINY, *layout, f"run.dir={folder}", *words, **more)


def rows(folder: Path, timing: bool = False) -> list[dict]:
    """Rows of metrics.jsonl, without wall-clock fields."""
    found = list(read_rows(folder / "metrics.jsonl"))
    return found if timing else [without_timing(row) for row in found]


def losses(folder: Path) -> list[float]:
    """Training losses in order of steps."""
    return [row["loss"] for row in rows(folder) if "loss" in row]


def summary(folder: Path) -> dict:
    """summary.json."""
    return json.loads((folder / "summary.json").read_text())
