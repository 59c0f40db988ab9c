"""`moeflow generate` on checkpoints that a real run saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moeflow.cli.main import main

SMALL = [
    "+recipe=gpt_moe",
    "+debug=tiny",
    "data.source=synthetic",
    "data.seq_len=24",
    "model.num_layers=2",
    "model.d_model=32",
    "model.num_experts=4",
    "optim.lr=1e-2",
    "run.dir=run",
]


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory) -> Path:
    """A run that two expert-parallel ranks trained and saved; the model knows more tokens than the text has."""
    folder = tmp_path_factory.mktemp("generate")
    words = [*SMALL, "launch.processes=2", "parallel.ep=2", "model.vocab_size=40"]
    done = subprocess.run(
        [sys.executable, "-m", "moeflow", "train", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.distributed
def test_text_from_a_checkpoint_of_another_layout(cli, run_of_two):
    first, again = (cli("generate", str(run_of_two), "--prompt", "The king", "--tokens", "30") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("The king")
    assert len(first.stdout) == len("The king") + 30 + 1
    assert again.stdout == first.stdout


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--prompt", ""], "at least one token"),
        (["--prompt", "\u20ac"], "does not occur"),
        (["--step", "77"], "no checkpoint of step 77"),
        (["--top-k", "none"], "--top-k none"),
        (["--tokens", "-4"], "--tokens -4"),
        (["--temprature", "1"], "--temperature"),
        (["model.d_model=64"], "model.d_model"),
    ],
)
def test_mistakes(run_of_two, words, what, capsys):
    assert main(["generate", str(run_of_two), *words]) == 2
    assert what in capsys.readouterr().err


def test_no_such_run(capsys):
    assert main(["generate", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
