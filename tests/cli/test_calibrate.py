"""moeflow calibrate measures a profile that runs and plan take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeflow.plan.profile import load_profile
from tests.train.runs import moeflow

SMALL = ["+recipe=gpt_moe", "+debug=tiny", "launch.device=cpu", "model.d_model=32", "model.expert_hidden=64"]


@pytest.mark.distributed
def test_what_is_measured_is_taken_by_a_run_and_by_plan(tmp_path: Path):
    out = tmp_path / "profile.json"
    two = ["launch.processes=2", "parallel.ep=2"]
    done = moeflow("calibrate", *SMALL, *two, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "GFLOP/s" in done.stdout and str(out) in done.stdout
    profile = load_profile(out)
    assert profile.source == "measured" and profile.device == "cpu"
    # Of one machine: the second node stays the default.
    assert profile.flops["fp32"] > 1e7 and profile.inside.bytes_per_s > 1e6 and 0 <= profile.overlap <= 1
    assert json.loads(out.read_text())["between"] == {"latency_s": 1e-4, "bytes_per_s": 1.2e8}
    again = moeflow("calibrate", *SMALL, *two, "--out", str(out), check=False)
    assert again.returncode != 0 and "exists" in again.stderr and "--force" in again.stderr
    run = moeflow("train", *SMALL, *two, f"balance.profile={out}", "overlap=auto", f"run.dir={tmp_path / 'run'}")
    assert run.returncode == 0, run.stderr
    plan = moeflow("plan", *SMALL, "--device", "cpu", "--ranks", "2", "--profile", str(out))
    assert plan.returncode == 0, plan.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["+recipe=gpt_dense", "--out", "/tmp/never-written.json"], "no experts"),
        (["+recipe=gpt_moe", "--out", "/nowhere/at/all.json"], "does not exist"),
        ([], "nothing"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], said: str):
    done = moeflow("calibrate", *words, check=False)
    assert done.returncode != 0 and said in done.stderr
