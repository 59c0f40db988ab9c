"""+debug=profile on real runs: traces, table and JSON."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.train.runs import moeflow, rows

pytestmark = pytest.mark.timeout(150)
SHORT = ["trainer.max_steps=9", "trainer.profile_after=3", "trainer.profile_steps=4", "launch.device=cpu"]
IMAGES = ["data.source=synthetic", "data.train_samples=512", "data.eval_samples=64", "data.batch_size=64"]


def profile_run(folder, *words: str, recipe: str = "cifar_moe"):
    data = IMAGES if recipe == "cifar_moe" else ["data.source=synthetic"]
    done = moeflow("train", f"+recipe={recipe}", "+debug=profile", *SHORT, *data, f"run.dir={folder}", *words)
    return done, json.loads((folder / "traces" / "step_00000008.json").read_text())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile") / "run"
    return folder, *profile_run(folder, "launch.processes=2", "parallel.ep=2")


def test_phases_sum_to_the_time_of_a_step_by_the_clock(two_ranks):
    _, _, content = two_ranks
    assert content["steps"] == 4
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
    for rank in content["ranks"]:
        total = sum(rank["forward_s"].values()) + sum(rank["backward_s"].values())
        assert total == pytest.approx(rank["step_s"], rel=1e-3), "phases leave nothing out and count nothing twice"
        assert total == pytest.approx(rank["measured_step_s"], rel=0.05), "as perf_counter sees it"
        both = {"gate", "dispatch", "all-to-all", "experts", "combine", "rest of the model"}
        assert both | {"data", "plan", "gradient sync", "optimizer"} <= set(rank["forward_s"])
        assert both <= set(rank["backward_s"])
        assert len(rank["operators"]) == 10
        assert rank["peak_bytes"] > 50 * 2**20


def test_the_trace_of_each_rank_is_json_with_the_phases(two_ranks):
    folder, _, content = two_ranks
    for number, rank in enumerate(content["ranks"]):
        with gzip.open(folder / "traces" / rank["trace"]) as stream:
            trace = json.load(stream)
        assert trace["distributedInfo"]["rank"] == number
        found = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
        assert found.count("moeflow/step") == 5, "one of them to warm up"
        for phase in ("gate", "plan", "dispatch", "all-to-all", "experts", "combine", "gradient sync"):
            assert found.count(f"moeflow/{phase}") >= 5, phase


def test_the_table_is_printed_once_and_training_goes_on(two_ranks):
    folder, done, _ = two_ranks
    lines = done.stdout.splitlines()
    assert sum(line.startswith("profile of 4 steps up to step 8, mean over 2 ranks") for line in lines) == 1
    for label in (
        "phase ",
        "gate ",
        "all-to-all ",
        "experts ",
        "optimizer ",
        "step ",
        "MFU ",
        "peak memory ",
        "traces ",
    ):
        assert any(line.startswith(label) for line in lines), label
    assert "USDT" not in done.stderr
    assert rows(folder)[-1]["step"] == 9


def test_mfu_is_of_the_active_parameters_by_hand(two_ranks):
    _, _, content = two_ranks
    # Three times the forward pass, 64 samples; the rates are what two processes measured on this machine.
    from moeflow.config import compose
    from moeflow.models import build_model
    from moeflow.models.flops import count_parameters

    config = compose(["+recipe=cifar_moe"])
    total, active = count_parameters(build_model(config.model, config.gate))
    assert (content["parameters"], content["active_parameters"]) == (total, active)
    able = sum(rank["peak_flops"] for rank in content["ranks"])
    slowest = max(rank["measured_step_s"] for rank in content["ranks"])
    assert content["mfu"] == pytest.approx(content["flops"] / (slowest * able))
    assert content["flops"] % (3 * 64) == 0
    assert 0.001 < content["mfu"] < 1.0


def test_a_run_that_ends_before_says_so(tmp_path):
    words = ["launch.processes=1", "parallel.ep=1", "trainer.max_steps=2"]
    done = moeflow("train", "+recipe=cifar_moe", "+debug=profile", *SHORT, *IMAGES, f"run.dir={tmp_path}/run", *words)
    assert "no step was profiled: only 2 were done (trainer.profile_after=N)" in done.stderr
    assert not (tmp_path / "run" / "traces").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["launch.processes=2", "parallel.pp=2", "parallel.pp_microbatches=2"],
        ["launch.processes=2", "parallel.tp=2"],
        ["launch.processes=1", "trainer.grad_accum=2", "trainer.compile=true"],
    ],
    ids=lambda words: words[1],
)
def test_other_layouts(words, tmp_path):
    sizes = ["model.num_layers=2", "model.d_model=32", "model.num_heads=2", "data.seq_len=32", "data.batch_size=8"]
    _, content = profile_run(tmp_path / "run", *sizes, *words, recipe="gpt_moe")
    for rank in content["ranks"]:
        total = sum(rank["forward_s"].values()) + sum(rank["backward_s"].values())
        assert total == pytest.approx(rank["step_s"], rel=1e-3)
        assert rank["forward_s"]["experts"] + rank["backward_s"]["experts"] > 0
