"""A stand-in for the training itself, so that the command line can be tested to its end without torch."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moeflow.cli.main import main
from moeflow.schema import RunConfig


class FakeTraining:
    """Stands for `moeflow.train.launch`: notes each call, "trains" to the last step, and ends as it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[RunConfig, Path, bool]] = []
        self.result: int | BaseException = 0
        self.saves = True
        self.steps: int | None = None  # of the checkpoint that is left; the last step of the run where None
        self.summary: dict[str, Any] = {"status": "finished", "eval/accuracy": 0.5}

    def launch(self, config: RunConfig, run_dir: str, resume: bool = False) -> int:
        self.calls.append((config, Path(run_dir), resume))
        if self.saves:
            last = self.steps or config.trainer.stop_at or config.trainer.max_steps
            step = Path(run_dir) / "checkpoints" / f"step_{last:08d}"
            step.mkdir(parents=True, exist_ok=True)
            (step / "manifest.json").write_text("{}")
        if isinstance(self.result, BaseException):
            raise self.result
        (Path(run_dir) / "summary.json").write_text(json.dumps(self.summary))
        return self.result

    def run_from_launcher(self, launched: Any, decide: Callable, load: Callable, resume: bool = False) -> int:
        run_dir = decide()
        return self.launch(load(run_dir), run_dir, resume)

    @property
    def run_dir(self) -> Path:
        """Folder of the latest call."""
        return self.calls[-1][1]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTraining:
    """The stand-in, and an empty folder to work in."""
    fake = FakeTraining()
    module = types.ModuleType("moeflow.train.launch")
    module.launch = fake.launch  # type: ignore[attr-defined]
    module.run_from_launcher = fake.run_from_launcher  # type: ignore[attr-defined]
    module.work = fake.launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "moeflow.train.launch", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["moeflow", "train", "+recipe=cifar_moe"])
    return fake


@pytest.fixture
def moeflow(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Function that runs the command in this process; returns exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
