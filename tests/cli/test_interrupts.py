"""Signals before the training listens to them: an end on the spot, whatever is being imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moeflow.config import load
from moeflow.config.plain import dump
from moeflow.train import rundir
from tests.distributed import LAUNCHER_VARIABLES, ROOT

pytestmark = pytest.mark.timeout(60)

STARTING = """
import sys, time
from moeflow import logging
from moeflow.cli.runs import supervised
from moeflow.train import rundir
logging.setup()

def start():
    print("ready", flush=True)
    try:
        time.sleep(50)
    except BaseException:
        raise RuntimeError("what an import makes of an interrupt")

sys.exit(supervised(start, [rundir.open(sys.argv[1])]))
"""

RANK = """
import sys, time
from moeflow.cli import worker

def work(argv):
    print("ready", flush=True)
    time.sleep(50)

worker._work = work
assert "torch" not in sys.modules
sys.exit(worker.main(["run"]))
"""


def ended_by(number: int, script: str, *words: str, before: str = "") -> tuple[int, str]:
    """Start the script, send the signal when it has said "ready"; returns the exit code and what was said."""
    process = subprocess.Popen(
        [*before.split(), sys.executable, "-c", script, *words],
        env={**{k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.stdout.read()
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    return process.returncode, out


@pytest.fixture
def run(training, moeflow) -> rundir.RunDir:
    """A run that a resume has changed, and that has not begun to train with it."""
    moeflow("train", "+recipe=cifar_moe")
    made = rundir.open(training.run_dir)
    config = load(made.config)
    config.optim.lr = 0.5
    made.replace_config(dump(config))
    made.mark("running")
    return made


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_ends_at_once(run: rundir.RunDir, number: signal.Signals) -> None:
    before = (run.path / "config.1.yaml").read_bytes()
    code, out = ended_by(number, STARTING, str(run.path))
    assert code == 128 + number
    assert out.endswith("interrupted\n")
    assert "Traceback" not in out
    assert (run.status()["state"], run.status()["exit_code"]) == ("interrupted", 128 + number)
    assert run.config.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_ends_without_a_word(number: signal.Signals) -> None:
    assert ended_by(number, RANK) == (128 + number, "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [[], ["launch.processes=2", "parallel.ep=2"]], ids=["1", "2 processes"])
def test_at_any_moment_of_a_real_start(tmp_path: Path, number: signal.Signals, words: list[str]) -> None:
    for tenths in range(6, 46, 3):
        folder = tmp_path / str(tenths)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "moeflow", "train", "+recipe=cifar_moe", "data.source=synthetic"),
                *(f"run.dir={folder}", *words),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        time.sleep(tenths / 10)
        made = (folder / "status.json").is_file()
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        out, _ = process.communicate(timeout=50)
        assert "Traceback" not in out, (tenths, out)
        assert process.returncode in (128 + number, -number), (tenths, out)
        assert not made or rundir.open(folder).status()["state"] in ("interrupted", "killed"), tenths
