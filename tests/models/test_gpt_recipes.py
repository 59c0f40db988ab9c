"""The language-model recipes on Tiny Shakespeare, at the size of the well-known small CPU setting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_experts_lower_the_validation_loss(shared_data: Path, tmp_path: Path):
    """A dense model of this size and number of steps (GELU, learned positions) is known to end near 1.88."""
    runs = {}
    for name in ("gpt_dense", "gpt_moe"):
        words = [f"+recipe={name}", f"data.path={shared_data / 'tinyshakespeare.txt'}", f"run.dir={tmp_path / name}"]
        command = [sys.executable, "-m", "moeflow", "train", *words, "launch.threads=1"]
        runs[name] = subprocess.Popen(command, cwd=tmp_path, env=os.environ.copy(), stdout=subprocess.DEVNULL)
    assert [run.wait(timeout=2900) for run in runs.values()] == [0, 0]
    dense, moe = (json.loads((tmp_path / name / "summary.json").read_text())["eval/loss"] for name in runs)
    assert dense < 1.88
    assert moe < dense
