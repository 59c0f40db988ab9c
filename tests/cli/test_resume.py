"""`moeflow resume`: changes are checked, shown and kept; nothing is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moeflow.config import load
from moeflow.config.plain import dump
from moeflow.errors import CheckpointError, MoeflowError, Stopped
from moeflow.train import rundir


@pytest.fixture
def stopped(training, moeflow, tmp_path: Path) -> Path:
    """A run of which the checkpoint of step 10 is the latest."""
    training.steps = 10
    moeflow("train", "+recipe=cifar_moe")
    return training.run_dir


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_plain(training, moeflow, stopped: Path) -> None:
    before = contents(stopped)
    code, _, err = moeflow("resume", str(stopped))
    assert code == 0
    assert "at step 10" in err
    assert training.calls[1] == (load(stopped / "config.yaml"), stopped, True)
    after = contents(stopped)
    assert after["config.yaml"] == before["config.yaml"]
    assert "config.1.yaml" not in after
    assert after["command.txt"].startswith(before["command.txt"])
    assert len(after["command.txt"].splitlines()) == 4


def test_changes_are_shown_and_the_old_file_kept(training, moeflow, stopped: Path) -> None:
    before = (stopped / "config.yaml").read_bytes()
    code, _, err = moeflow("resume", str(stopped), "trainer.max_steps=77", "optim.lr=1e-5", "tracker=tensorboard")
    assert code == 0
    for line in ("trainer.max_steps: ", " -> 77", "-> 1e-05", "tracker.names: [] -> [tensorboard]"):
        assert line in err
    config = training.calls[1][0]
    assert (config.trainer.max_steps, config.optim.lr, config.tracker.names) == (77, 1e-5, ["tensorboard"])
    assert (stopped / "config.1.yaml").read_bytes() == before
    moeflow("resume", str(stopped), "optim.lr=2e-5")
    assert load(stopped / "config.2.yaml").optim.lr == 1e-5
    assert load(stopped / "config.yaml").optim.lr == 2e-5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.num_experts=16"], ["model.num_experts: 8 -> 16", "--force"]),
        (["gate=switch", "data.batch_size=64"], ["gate.name", "data.batch_size"]),
        (["optim.lrr=1"], ["Did you mean 'optim.lr'?"]),
        (["optim.lr=abc"], ["number"]),
        (["trainer.max_steps=0"], ["at least 1"]),
        (["launch.processes=3"], ["data.batch_size"]),
        (["run.dir=/elsewhere", "--force"], ["keeps its run.dir"]),
        (["+recipe=cifar_moe"], ["made from"]),
    ],
)
def test_refusals_change_nothing(training, moeflow, stopped: Path, words: list[str], expected: list[str]) -> None:
    before = contents(stopped)
    code, out, err = moeflow("resume", str(stopped), *words)
    assert (code, out) == (2, "")
    for part in expected:
        assert part in err
    after = contents(stopped)
    assert before == after
    assert len(training.calls) == 1


def test_force(training, moeflow, stopped: Path) -> None:
    assert moeflow("resume", str(stopped), "model.num_experts=16", "--force")[0] == 0
    assert training.calls[1][0].model.num_experts == 16


@pytest.mark.parametrize("result", [2, 128 + 15, CheckpointError("it does not fit"), Stopped(15)])
def test_changes_that_trained_no_step_are_taken_back(training, moeflow, stopped: Path, result) -> None:
    before = (stopped / "config.yaml").read_bytes()
    training.result = result
    code, _, err = moeflow("resume", str(stopped), "--force", "model.num_experts=16")
    assert code == (result if isinstance(result, int) else 128 + 15 if isinstance(result, Stopped) else 2)
    assert "as it was before" in err
    assert (stopped / "config.yaml").read_bytes() == before
    assert not (stopped / "config.1.yaml").exists()
    training.result = 0
    moeflow("resume", str(stopped), "trainer.max_steps=77")
    assert (training.calls[-1][0].model.num_experts, training.calls[-1][0].trainer.max_steps) == (8, 77)


def test_changes_that_trained_a_step_stay_whatever_comes_after(training, moeflow, stopped: Path, monkeypatch) -> None:
    def train_and_fail(config, run_dir, resume=False):
        rundir.RunDir(Path(run_dir)).begin()
        return 4

    monkeypatch.setattr(sys.modules["moeflow.train.launch"], "launch", train_and_fail)
    code, _, err = moeflow("resume", str(stopped), "optim.lr=1e-5")
    assert code == 4
    assert f"go on from the last checkpoint with: moeflow resume {stopped.relative_to(Path.cwd())}" in err
    assert load(stopped / "config.yaml").optim.lr == 1e-5
    assert load(stopped / "config.1.yaml").optim.lr != 1e-5


def test_a_failure_says_how_to_go_on_after_it_is_mended(training, moeflow, stopped: Path, monkeypatch) -> None:
    def fail(config, run_dir, resume=False):
        rundir.RunDir(Path(run_dir)).begin()
        raise MoeflowError("the disk is full", "free some")

    monkeypatch.setattr(sys.modules["moeflow.train.launch"], "launch", fail)
    shown = stopped.relative_to(Path.cwd())
    assert moeflow("resume", str(stopped))[2].endswith(
        f"error: the disk is full\n  mend: free some\n  then: moeflow resume {shown}\n"
    )


def test_changes_of_a_resume_that_was_killed_before_its_first_step(training, moeflow, stopped: Path) -> None:
    run, before = rundir.open(stopped), load(stopped / "config.yaml")
    config = load(stopped / "config.yaml")
    config.launch.device = "cuda"
    with run.lock():  # as far as a resume comes before it starts the training
        run.replace_config(dump(config))
        run.mark("running")
    moeflow("resume", str(stopped))
    assert training.calls[-1][0] == before


def test_dry_run(training, moeflow, stopped: Path) -> None:
    before = contents(stopped)
    code, out, _ = moeflow("resume", str(stopped), "optim.lr=0.5", "--dry-run")
    assert code == 0
    assert "-> 0.5" in out
    assert "step 10" in out
    assert contents(stopped) == before


def test_from_an_earlier_step(training, moeflow, stopped: Path) -> None:
    training.steps = 30
    moeflow("resume", str(stopped))
    assert "at step 30" in moeflow("resume", str(stopped))[2]
    before = contents(stopped)
    assert "checkpoint  step 10" in moeflow("resume", str(stopped), "--step", "10", "--dry-run")[1]
    for step, message in (("20", "choose one of the steps [10, 30]"), ("x", "--step 1000")):
        code, out, err = moeflow("resume", str(stopped), "--step", step)
        assert (code, out) == (2, "")
        assert message in err
    assert contents(stopped) == before
    code, _, err = moeflow("resume", str(stopped), "--step", "10")
    assert code == 0
    assert "at step 10" in err
    assert rundir.open(stopped).latest_step() == 10


def test_a_stop_that_was_reached_does_not_stop_again(training, moeflow) -> None:
    moeflow("train", "+recipe=cifar_moe", "trainer.stop_at=10")
    run = str(training.run_dir)
    training.steps = 10
    assert "trainer.stop_at: 10 -> null" in moeflow("resume", run)[2]
    assert training.calls[-1][0].trainer.stop_at is None
    moeflow("resume", run, "trainer.stop_at=20")
    assert training.calls[-1][0].trainer.stop_at == 20
    # That one was not reached: it still stands.
    moeflow("resume", run)
    assert training.calls[-1][0].trainer.stop_at == 20


def test_from_another_folder_and_after_a_move(training, moeflow, stopped: Path, tmp_path: Path, monkeypatch) -> None:
    moved = tmp_path / "archive" / "old run"
    moved.parent.mkdir()
    stopped.rename(moved)
    monkeypatch.chdir("/")
    assert moeflow("resume", str(moved))[0] == 0
    assert training.run_dir == moved
    assert load(moved / "config.yaml").run.dir == str(moved)
    assert load(moved / "config.1.yaml").run.dir == str(stopped)


def test_no_checkpoint(training, moeflow) -> None:
    training.saves = False
    moeflow("train", "+recipe=cifar_moe")
    code, _, err = moeflow("resume", str(training.run_dir))
    assert code == 2
    assert "no checkpoint" in err
    assert "moeflow train +recipe=cifar_moe" in err
    assert len(training.calls) == 1
    command = training.run_dir / "command.txt"
    command.write_text("# when\nmoeflow train +recipe=cifar_moe 'run.dir=a b' 'run.name=\"c d\"'\n# later\nmoeflow x\n")
    err = moeflow("resume", str(training.run_dir))[2]
    assert err.endswith("start anew: moeflow train +recipe=cifar_moe 'run.name=\"c d\"'\n"), "the folder is taken"


def test_a_run_in_use(training, moeflow, stopped: Path) -> None:
    with rundir.open(stopped).lock():
        code, _, err = moeflow("resume", str(stopped), "optim.lr=0.5")
    assert code == 2
    assert "in use" in err
    assert not (stopped / "config.1.yaml").exists()


def test_two_run_folders(training, moeflow, stopped: Path) -> None:
    for verb in ("resume", "eval"):
        code, _, err = moeflow(verb, str(stopped), str(stopped))
        assert (code, err.count("\n")) == (2, 2)
        assert f"takes one run folder, and '{stopped}' is another one" in err


def test_a_damaged_configuration(training, moeflow, stopped: Path) -> None:
    (stopped / "config.yaml").write_text("gate: {name: naive")
    code, _, err = moeflow("resume", str(stopped))
    assert code == 2
    assert "config.yaml, line" in err


def test_as_a_rank(training, moeflow, stopped: Path, monkeypatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = moeflow("resume", str(stopped))
    assert code == 0
    assert "launch.processes: 1 -> 2" in err
    assert load(stopped / "config.yaml").launch.processes == 2
