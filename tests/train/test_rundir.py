"""Run folders: made once, never shared, locked while in use, and true about their state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moeflow.errors import ConfigError, LaunchError
from moeflow.schema import RunConfig
from moeflow.train import rundir
from moeflow.train.rundir import RunDir
from tests.distributed import ROOT


def config_in(root: Path, **run: str) -> RunConfig:
    config = RunConfig()
    config.run.root = str(root)
    config.run.recipe = "some_recipe"
    for key, value in run.items():
        setattr(config.run, key, value)
    return config


def dump(config: RunConfig) -> str:
    return f"dir: {config.run.dir}\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return rundir.create(config_in(tmp_path), dump, {"command.txt": "moeflow train\n"})


def test_a_new_folder(run: RunDir, tmp_path: Path) -> None:
    assert run.path.parent == tmp_path / "some_recipe"
    time.strptime(run.path.name[:19], "%Y-%m-%d_%H-%M-%S")
    assert 4 <= len(run.path.name[20:]) <= 6
    assert run.config.read_text() == f"dir: {run.path}\n"
    assert run.command.read_text() == "moeflow train\n"
    assert run.status()["state"] == "created"
    assert run.latest_step() is None
    without = config_in(tmp_path)
    without.run.recipe = None
    assert rundir.create(without, dump).path.parent.name == rundir.NO_RECIPE


def test_many_at_once_never_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ids from a space of four collide all the time; each thread still gets a folder of its own.
    ids = iter(f"00000{n % 4}" for n in range(100_000))
    lock = threading.Lock()

    def token(_: int) -> str:
        with lock:
            return next(ids)

    monkeypatch.setattr(rundir.secrets, "token_hex", token)
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(rundir.create(config_in(tmp_path), dump).path)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(made) == len(set(made)) == 6


def test_a_named_folder_is_taken_once(tmp_path: Path) -> None:
    config = config_in(tmp_path, dir=str(tmp_path / "a" / "b"))
    results: list[object] = []

    def make() -> None:
        try:
            results.append(rundir.create(config, dump))
        except ConfigError as error:
            results.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sum(isinstance(result, RunDir) for result in results) == 1
    assert all("moeflow resume" in str(error) for error in results if isinstance(error, ConfigError))
    before = {path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()}
    with pytest.raises(ConfigError, match="holds a run already"):
        rundir.create(config, dump)
    assert {path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()} == before


def test_folders_that_cannot_be_taken(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        rundir.create(config_in(tmp_path, dir=str(tmp_path / "full")), dump)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        rundir.create(config_in(tmp_path, dir=str(tmp_path / "file")), dump)
    with pytest.raises(ConfigError, match="cannot be made"):
        rundir.create(config_in(tmp_path / "file"), dump)
    with pytest.raises(ConfigError, match="cannot be made"):
        rundir.create(config_in(tmp_path, dir=str(tmp_path / "file" / "below")), dump)
    (tmp_path / "empty").mkdir()
    assert rundir.create(config_in(tmp_path, dir=str(tmp_path / "empty")), dump).path == tmp_path / "empty"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir, "write_atomic", full)
    with pytest.raises(ConfigError, match="No space left"):
        rundir.create(config_in(tmp_path), dump)
    assert not list((tmp_path / "some_recipe").iterdir())


def test_open_says_what_is_wrong(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rundir.open(run.path) == run
    assert rundir.open(run.config) == run
    monkeypatch.chdir(tmp_path)
    assert rundir.open(f"some_recipe/{run.path.name}/") == run
    (tmp_path / "file").write_text("")
    (run.path / "checkpoints").mkdir()
    for path, expected in [
        (run.path.with_name(run.path.name + "x"), str(run.path)),
        (tmp_path / "nowhere" / "at_all", "no run folder"),
        (tmp_path / "file", "is a file"),
        (run.checkpoints, f"give the run folder itself: {run.path}"),
        (tmp_path / "some_recipe", f"give the run folder itself: {run.path}"),
        (tmp_path, "no config.yaml"),
    ]:
        with pytest.raises(ConfigError) as caught:
            rundir.open(path)
        assert expected in str(caught.value)


def test_list_is_newest_first(tmp_path: Path) -> None:
    for name in ("2024-01-01_00-00-00-aaaaaa", "2025-01-01_00-00-00-000000", "2024-06-01_00-00-00-ffffff"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    (tmp_path / "notes").mkdir()
    assert [run.path.name[:7] for run in rundir.list_runs(tmp_path)] == ["2025-01", "2024-06", "2024-01"]
    assert rundir.list_runs(tmp_path / "nowhere") == []


def test_status_keeps_its_history(run: RunDir) -> None:
    run.mark("running")
    run.mark("finished", exit_code=0)
    status = run.status()
    assert (status["state"], status["exit_code"], status["pid"]) == ("finished", 0, os.getpid())
    assert status["created"] <= status["running"] <= status["finished"]
    (run.path / "status.json").write_text("{broken")
    assert run.status()["state"] == "unknown"


HOLDER = """
import sys, time
from moeflow.train import rundir
run = rundir.open(sys.argv[1])
run.acquire()
run.mark("running")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold() -> Callable[[RunDir], subprocess.Popen]:
    started = []

    def start(run: RunDir) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(run.path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.timeout(60)
def test_two_processes_never_train_in_one_folder(run: RunDir, hold) -> None:
    process = hold(run)
    assert run.in_use()
    assert run.status()["state"] == "running"
    with pytest.raises(LaunchError, match=f"process {process.pid} on"):
        run.acquire(patience_s=0.2)
    assert run.in_use()
    # However the holder ends, the folder is free, and a run that never said how it ended was killed.
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not run.in_use()
    assert run.status()["state"] == "killed"
    with run.lock():
        assert run.in_use()
        run.mark("finished")
    assert not run.in_use()
    assert run.status()["state"] == "finished"


def test_looking_does_not_lose_the_lock(run: RunDir) -> None:
    """A record lock goes with any descriptor of the file that its process closes."""
    code = f"from moeflow.train import rundir; print(rundir.open({str(run.path)!r}).in_use())"
    with run.lock():
        assert run.in_use()
        with pytest.raises(LaunchError, match="this very process"):
            run.acquire()
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=60,
        )
        assert done.stdout.strip() == "True", done.stderr


def test_replaced_configurations_are_all_kept(run: RunDir) -> None:
    first = run.config.read_text()
    assert run.replace_config("two").name == "config.1.yaml"
    assert run.replace_config("three").name == "config.2.yaml"
    (run.path / "config.3.yaml").write_text("the user's own copy")
    assert run.replace_config("four").name == "config.4.yaml"
    texts = [(run.path / f"config.{n}.yaml").read_text() for n in (1, 2, 3, 4)]
    assert texts == [first, "two", "the user's own copy", "three"]
    assert run.config.read_text() == "four"


def test_without_hard_links(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    first = run.config.read_text()
    assert run.replace_config("two").read_text() == first
    assert run.replace_config("three").name == "config.2.yaml"
    assert run.config.read_text() == "three"


def test_neither_torch_nor_hydra_is_imported() -> None:
    code = "import json, sys, moeflow.train.rundir; print(json.dumps([m for m in %r if m in sys.modules]))"
    code %= (("torch", "hydra", "omegaconf"),)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True
    )
    assert json.loads(done.stdout) == []


def test_runs_of_one_second_are_in_the_order_of_their_making(tmp_path: Path):
    made = [rundir.create(config_in(tmp_path), dump).path for _ in range(20)]
    assert [run.path for run in rundir.list_runs(tmp_path / "some_recipe")] == made[::-1]
