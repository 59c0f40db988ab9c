"""Sweeps: what they expand to, that a failing job stops no other, the ranking, and a real interrupt."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from moeflow.cli.sweep import Job, expand, rank, sweep
from moeflow.config import compose
from moeflow.config.options import options
from moeflow.errors import ConfigError
from tests.distributed import ROOT


def test_every_combination_the_last_varying_fastest() -> None:
    jobs = expand(["+recipe=cifar_moe", "gate=naive,switch", "optim.lr=1e-3", "trainer.max_steps=range(1,7,2)"])
    assert [job.varied for job in jobs] == [
        [f"gate={gate}", f"trainer.max_steps={steps}"] for gate in ("naive", "switch") for steps in (1, 3, 5)
    ]
    assert jobs[3].words == ["+recipe=cifar_moe", "gate=switch", "optim.lr=1e-3", "trainer.max_steps=1"]


def test_other_forms() -> None:
    names = [job.words[0] for job in expand(["+recipe=glob(*)"])]
    assert names == [f"+recipe={name}" for name in options("recipe")]
    assert [job.words[0] for job in expand(["+recipe=glob(cifar_*,exclude=*dense)"])] == [
        "+recipe=cifar_moe",
        "+recipe=cifar_tutorial_moe",
    ]
    quoted = expand(["run.name=choice('a b','c,d')"])
    assert [compose(job.words).run.name for job in quoted] == ["a b", "c,d"]
    assert [job.words[0] for job in expand(["optim.betas=[0.8,0.9],[0.9,0.99]"])] == [
        "optim.betas=[0.8,0.9]",
        "optim.betas=[0.9,0.99]",
    ]
    assert len(expand(["gate=naive"])) == 1


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optim.lr=interval(0,1)", "range"),
        ("optim.lr=glob(*)", "group"),
        ("+recipe=glob(zzz*)", "matches none"),
        ("optim.lr=range(3,1)", "no values"),
        ("run.seed=range(0,1e9)", "at most"),
        ("optim.lr 1,2", "KEY=VALUE"),
    ],
)
def test_sweeps_that_cannot_be_read(word: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand([word])
    assert expected in str(caught.value)


class Runner:
    """Stands for the processes of the jobs: writes what a run would leave, and fails where it is told to."""

    def __init__(self, accuracies: dict[str, float | None], fails: str = "", interrupts: str = ""):
        self.accuracies, self.fails, self.interrupts = accuracies, fails, interrupts
        self.words: list[Sequence[str]] = []

    def __call__(self, job: Job, words: Sequence[str]) -> int:
        self.words.append(words)
        if job.name == self.interrupts:
            raise KeyboardInterrupt
        if job.name == self.fails:
            return 4
        assert job.run_dir is not None
        job.run_dir.mkdir(parents=True)
        (job.run_dir / "summary.json").write_text(json.dumps({"eval/accuracy": self.accuracies[job.name], "loss": 1.0}))
        return 0


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def result(tmp_path: Path) -> dict:
    (folder,) = (tmp_path / "outputs" / "sweeps").iterdir()
    return json.loads((folder / "sweep.json").read_text())


def test_a_failing_job_stops_no_other(tmp_path: Path, capsys) -> None:
    runner = Runner({"gate=naive": 0.3, "gate=switch": 0.7}, fails="gate=gshard")
    assert sweep(["+recipe=cifar_moe", "gate=naive,gshard,switch"], [], runner=runner) == 1
    written = result(tmp_path)
    assert written["ranked_by"] == "eval/accuracy"
    assert [job["state"] for job in written["jobs"]] == ["finished", "failed", "finished"]
    assert written["ranking"] == [2, 0, 1]
    out = capsys.readouterr().out
    assert out.index("gate=switch") < out.index("gate=naive") < out.index("gate=gshard")
    assert "failed (4)" in out
    assert "sweep.json" in out
    for number, words in enumerate(runner.words):
        assert words[0] == "train"
        assert "+recipe=cifar_moe" in words
        assert words[-1].startswith("run.dir=")
        assert words[-1].endswith(f"/{number:03d}")


def test_all_well(tmp_path: Path) -> None:
    assert sweep(["gate=naive,switch"], [], runner=Runner({"gate=naive": 0.3, "gate=switch": 0.7})) == 0


def test_an_invalid_job_is_told_before_the_first_starts(tmp_path: Path, caplog) -> None:
    runner = Runner({"gate.top_k=2": 0.5})
    assert sweep(["gate=gshard", "gate.top_k=1,2"], [], runner=runner) == 1
    assert len(runner.words) == 1
    job = result(tmp_path)["jobs"][0]
    assert (job["state"], job["exit_code"]) == ("invalid", 2)
    assert "gate.top_k=1" in job["error"]


def test_when_no_job_is_valid_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'optim.lr'"):
        sweep(["gate=naive,switch", "optim.lrr=1"], [], runner=Runner({}))
    with pytest.raises(ConfigError, match="nothing to sweep"):
        sweep([], [], runner=Runner({}))
    assert not list(tmp_path.iterdir())


def test_an_interrupt_ends_the_sweep_with_its_table(tmp_path: Path, capsys) -> None:
    runner = Runner({"gate=naive": 0.3}, interrupts="gate=gshard")
    assert sweep(["gate=naive,gshard,switch"], [], runner=runner) == 130
    assert [job["state"] for job in result(tmp_path)["jobs"]] == ["finished", "interrupted", "waiting"]
    assert "gate=naive" in capsys.readouterr().out


def test_users_folders_and_awkward_paths_reach_the_jobs(tmp_path: Path) -> None:
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text("trainer: {max_steps: 3}\n")
    runner = Runner({"gate=naive": 0.3, "gate=switch": None})
    words = ["+recipe=mine", "gate=naive,switch", "run.root='my runs'"]
    assert sweep(words, ["conf"], verbosity=-1, runner=runner) == 0
    assert list(runner.words[0][:4]) == ["train", "--config-dir", str(tmp_path / "conf"), "-q"]
    # The words as they are passed on compose again, to the very folder.
    assert compose(list(runner.words[1][4:]), ["conf"]).run.dir.startswith(str(tmp_path / "my runs" / "sweeps"))


def test_ranking() -> None:
    def jobs(figure: str, values: list[float | None]) -> list[Job]:
        return [Job(n, [], [], metrics={} if v is None else {figure: v}) for n, v in enumerate(values)]

    values = [0.2, None, 0.9, float("nan"), 0.5]
    for figure, order in (("eval/accuracy", [2, 4, 0, 1, 3]), ("eval/loss", [0, 4, 2, 1, 3])):
        shuffled = jobs(figure, values)
        random.Random(1).shuffle(shuffled)
        found, ranked = rank(shuffled)
        assert found == figure
        assert [job.number for job in ranked][:3] == order[:3]
    assert rank(jobs("x", [None, None]))[0] is None


JOB = """
import json, os, pathlib, signal, sys, time
words = sys.argv[1:]
run = pathlib.Path(next(w for w in words if w.startswith("run.dir="))[8:])
run.mkdir(parents=True)
count = 0
def stop(number, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("started", flush=True)
while not count:
    time.sleep(0.02)
time.sleep(0.3)
(run / "summary.json").write_text(json.dumps({"interrupts": count, "eval/loss": 0.25}))
sys.exit(130)
"""

SWEEP = """
import sys, subprocess
from moeflow.cli import sweep
real = subprocess.Popen
sweep.subprocess.Popen = lambda argv, **kw: real([sys.executable, "-c", open("job.py").read(), *argv[3:]], **kw)
sys.exit(sweep.sweep(["gate=naive,switch"], []))
"""


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_job_once_and_it_may_save(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "job.py").write_text(JOB)
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    while "started" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.2)
    os.killpg(process.pid, number)  # as a terminal does: the whole group
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, out
    written = result(tmp_path)
    assert [job["state"] for job in written["jobs"]] == ["interrupted", "waiting"]
    assert written["jobs"][0]["metrics"] == {"eval/loss": 0.25}
    assert json.loads(next(tmp_path.glob("outputs/sweeps/*/000/summary.json")).read_text())["interrupts"] == 1
    assert "Traceback" not in out
