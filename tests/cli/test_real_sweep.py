"""One sweep with nothing replaced: real processes, real training, a job that fails while it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeflow.train import rundir


@pytest.mark.timeout(180)
def test_a_real_sweep(cli, tmp_path: Path) -> None:
    done = cli(
        "train",
        "--multirun",
        "+recipe=cifar_moe",
        "+debug=tiny",
        "trainer.max_steps=2",
        "data.root=nowhere",
        "data.source=real,synthetic",
        timeout=170,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    (written,) = tmp_path.glob("outputs/sweeps/*/sweep.json")
    result = json.loads(written.read_text())
    # The folder of the data is missing for the first job alone; that is found out when it runs, not before.
    assert [(job["state"], job["exit_code"]) for job in result["jobs"]] == [("failed", 2), ("finished", 0)]
    assert (result["ranked_by"], result["ranking"]) == ("eval/accuracy", [1, 0])
    for job, state in zip(result["jobs"], ("failed", "finished"), strict=True):
        run = rundir.open(job["run_dir"])
        assert run.path.parent == written.parent
        assert run.status()["state"] == state
    summary = json.loads((written.parent / "001" / "summary.json").read_text())
    assert result["jobs"][1]["metrics"]["eval/accuracy"] == summary["eval/accuracy"]
    assert "data.source=synthetic" in done.stdout
    # Every run of a sweep is a run like any other.
    again = cli("eval", str(written.parent / "001"), "--json", timeout=60)
    assert json.loads(again.stdout)["eval/accuracy"] == summary["eval/accuracy"], again.stderr
