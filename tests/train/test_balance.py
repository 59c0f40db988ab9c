"""Balance in a run of the command line: what it logs, and that it goes on to the bit."""

from __future__ import annotations

import json

import pytest

from tests.train.runs import moeflow, rows, train
from tests.train.test_runs import saved_tensors

STEPS = 8
WORDS = ["launch.processes=2", "parallel.ep=2", "trainer.eval_every=4", f"trainer.max_steps={STEPS}"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Coefficients with which messages cost next to nothing and uneven work much."""
    link = {"latency_s": 0.0, "bytes_per_s": 1e15}
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(json.dumps({"inside": link, "between": link, "flops": {"fp32": 1e6}, "launch_s": 0}))
    return path


def same_to_the_bit(one, other):
    first, second = saved_tensors(one, STEPS), saved_tensors(other, STEPS)
    assert first.keys() == second.keys()
    assert all(value.equal(second[key]) for key, value in first.items())


@pytest.mark.distributed
def test_a_resumed_run_with_shadows_is_the_same_to_the_bit(tmp_path, profile):
    words = [*WORDS, "balance=shadow", f"balance.profile={profile}"]
    train(tmp_path / "whole", *words)
    train(tmp_path / "parts", *words, "trainer.stop_at=3")
    moeflow("resume", str(tmp_path / "parts"), "trainer.stop_at=null")
    found = rows(tmp_path / "whole")
    assert rows(tmp_path / "parts") == found
    same_to_the_bit(tmp_path / "whole", tmp_path / "parts")
    logged = [row for row in found if "loss" in row]
    assert len(logged) == STEPS
    for row in logged:
        assert row["balance/imbalance"] <= row["balance/imbalance_before"] + 1e-9
        assert row["balance/bytes_sent"] >= 0 and row["balance/predicted_s"] > 0 and row["balance/migrations"] == 0
    assert any(row["balance/shadowed"] > 0 for row in logged)
