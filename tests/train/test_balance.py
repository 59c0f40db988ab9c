"""Balance in a run of the command line: what it logs, that it goes on to the bit, and that checkpoints know of none."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.train.runs import losses, moeflow, rows, train
from tests.train.test_runs import saved_tensors

STEPS = 6
WORDS = ["launch.processes=2", "parallel.ep=2", "trainer.eval_every=3", f"trainer.max_steps={STEPS}"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Coefficients with which messages cost next to nothing and uneven work much."""
    link = {"latency_s": 0.0, "bytes_per_s": 1e15}
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(json.dumps({"inside": link, "between": link, "flops": {"fp32": 1e6}, "launch_s": 0}))
    return path


def same_to_the_bit(one, other, step=STEPS):
    first, second = saved_tensors(one, step), saved_tensors(other, step)
    assert first.keys() == second.keys()
    assert all(value.equal(second[key]) for key, value in first.items())


@pytest.mark.distributed
def test_with_everything_on(tmp_path, profile):
    """Shadows, and experts that move after every second step."""
    words = [*WORDS, "balance=full", "balance.interval=2", f"balance.profile={profile}"]
    train(tmp_path / "parts", *words, "trainer.stop_at=3")
    elsewhere = shutil.copytree(tmp_path / "parts", tmp_path / "elsewhere")
    moeflow("resume", str(tmp_path / "parts"), "trainer.stop_at=null")
    train(tmp_path / "whole", *words)

    # It goes on to the bit.
    found = rows(tmp_path / "whole")
    assert rows(tmp_path / "parts") == found
    same_to_the_bit(tmp_path / "whole", tmp_path / "parts")

    # What it did is logged.
    logged = [row for row in found if "loss" in row]
    assert len(logged) == STEPS
    for row in logged:
        assert row["balance/imbalance"] <= row["balance/imbalance_before"] + 1e-9
        assert row["balance/bytes_sent"] >= 0 and row["balance/predicted_s"] > 0
    assert any(row["balance/shadowed"] > 0 for row in logged)
    moved = [row["balance/migrations"] for row in logged]
    assert sum(moved) > 0 and moved[0] == moved[2] == moved[4] == 0

    # A checkpoint of experts that had moved goes on without balance, and other layouts read it.
    moeflow("ckpt", "verify", str(elsewhere))
    words = ["launch.processes=1", "parallel.ep=1", "balance=none"]
    moeflow("ckpt", "reshard", str(elsewhere), str(tmp_path / "one"), *words)
    same_to_the_bit(elsewhere, tmp_path / "one", 3)
    moeflow("resume", str(elsewhere), "trainer.stop_at=null", "balance=none")
    assert losses(elsewhere) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_shadows_alone_go_on_to_the_bit(tmp_path, profile):
    words = [*WORDS, "balance=shadow", f"balance.profile={profile}"]
    train(tmp_path / "whole", *words)
    train(tmp_path / "parts", *words, "trainer.stop_at=3")
    moeflow("resume", str(tmp_path / "parts"), "trainer.stop_at=null")
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    same_to_the_bit(tmp_path / "whole", tmp_path / "parts")


def test_without_balance_nothing_is_logged_of_it(tmp_path):
    train(tmp_path / "run", "trainer.max_steps=1")
    assert not any(key.startswith("balance/") for row in rows(tmp_path / "run") for key in row)
