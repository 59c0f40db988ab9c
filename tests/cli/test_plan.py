"""`moeflow plan`: what it prints adds up, what it writes can be composed, and it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from moeflow.cli.main import main
from moeflow.cli.plan import split_words
from moeflow.config import compose
from tests.distributed import ROOT

SMALL = ["+recipe=gpt_moe", "model.vocab_size=256", "data.batch_size=64"]


def planned(capsys, *words):
    assert main(["plan", *SMALL, *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_proposed_can_be_composed(capsys, tmp_path):
    path = tmp_path / "words"
    found = planned(capsys, "--device", "a100", "--ranks", "16", "--apply", str(path))
    words = path.read_text().split()
    assert words[: len(SMALL)] == SMALL
    config = compose(words)
    best = found["proposals"][0]
    assert config.launch.processes == 16
    for axis in ("pp", "tp", "ep", "etp"):
        assert getattr(config.parallel, axis) == best[axis]
    assert config.trainer.grad_accum * (config.parallel.pp_microbatches or 1) == best["micro_batches"]
    assert best["dp"] * best["micro_batch"] * best["micro_batches"] == 64


def test_sums(capsys):
    found = planned(capsys, "--device", "a100", "--ranks", "8")
    for proposal in found["proposals"]:
        for table, total in (("memory", "total"), ("time", "total_s")):
            parts = {k: v for k, v in proposal[table].items() if k not in (total, "chunks", "hierarchical")}
            assert sum(parts.values()) == pytest.approx(proposal[table][total])
    assert found["held"]["dense"] + found["held"]["experts"] == found["parameters"] + found["held"]["repeated"]
    times = [p["time"]["total_s"] for p in found["proposals"]]
    assert times == sorted(times)


def test_axes_that_are_named_stay(capsys):
    found = planned(capsys, "--ranks", "8", "parallel.tp=2", "parallel.ep=4", "trainer.grad_accum=7")
    assert {(p["tp"], p["ep"]) for p in found["proposals"]} == {(2, 4)}
    for again in (False, True):
        found = planned(capsys, "--ranks", "8", f"model.activation_checkpointing={again}")
        assert {p["checkpointing"] for p in found["proposals"]} == {again}
    assert split_words(["a=1", "parallel.pp=3", "launch.processes=5"]) == (["a=1"], {"pp": 3}, 5)


def test_ranks_are_the_processes_that_the_words_name(capsys):
    assert planned(capsys, "launch.processes=4")["ranks"] == 4


def test_the_text_tells_each_part(capsys):
    assert main(["plan", *SMALL, "--device", "h100", "--ranks", "8"]) == 0
    out = capsys.readouterr().out
    for part in ("searched", "predicted seconds", "predicted memory", "why", "words for moeflow train", "parallel.ep="):
        assert part in out


def test_a_trace_tells_imbalance_and_gains(capsys, tmp_path):
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(8, 0.4), size=3)
    counts = np.stack([[[rng.multinomial(2000, s) for s in shares] for _ in range(4)] for _ in range(5)])
    path = tmp_path / "trace.npz"
    np.savez(path, counts=counts, iteration=np.arange(5))
    # Of a tiny model's layer nothing would pay.
    large = ["data.seq_len=2048", "model.d_model=1024", "model.num_heads=8"]
    found = planned(capsys, "--ranks", "8", "--device", "a100", "--trace", str(path), "parallel.ep=8", *large)
    gains = {gain["name"]: gain for gain in found["balance"]}
    assert gains["none"]["imbalance"] > 1.5
    assert gains["replicas and shadows"]["imbalance"] < 0.7 * gains["none"]["imbalance"]
    assert len(found["placement"]) == 3
    assert sorted(found["placement"][0]) == list(range(8))
    assert planned(capsys, "--ranks", "8", "--trace", str(path), "parallel.ep=1")["balance"] is None


def test_a_cluster_and_a_profile_from_files(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("nodes: 2\nranks_per_node: 4\ndevice: a100\nprofile: {flops: {fp32: 1e12}}\n")
    slow = planned(capsys, "--cluster", str(tmp_path / "c.yaml"))
    assert slow["ranks"] == 8
    fast = planned(capsys, "--ranks", "8", "--per-node", "4", "--device", "a100")
    assert slow["proposals"][0]["time"]["total_s"] > fast["proposals"][0]["time"]["total_s"]
    (tmp_path / "p.json").write_text('{"device": "h100"}')
    assert planned(capsys, "--ranks", "8", "--profile", str(tmp_path / "p.json"))["ranks"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "c.yaml", "--ranks", "8"], "cannot stand beside it"),
        (["--imbalance", "0.5"], "at least the mean"),
        (["--imbalance", "2", "--trace", "t.npz"], "one of both"),
        (["--ranks", "0"], "must be above 0"),
        (["--device", "h101"], "Did you mean 'h100'"),
        (["parallel.tp=two"], "whole number above 0"),
        (["--ranks", "12"], "do not fill nodes of 8"),
        (["--trace", "none.npz"], "no routing trace"),
        (["--cluster", "none.yaml"], "cannot be read"),
    ],
)
def test_mistakes(capsys, words, message):
    assert main(["plan", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err


def test_models_that_it_cannot_count(capsys):
    assert main(["plan", "+recipe=cifar_moe"]) == 2
    assert "moeflow plan counts language models" in capsys.readouterr().err


def test_a_giant_model_needs_no_torch_and_less_than_a_minute():
    words = [
        "+recipe=gpt_moe", "model.num_layers=96", "model.d_model=12288", "model.num_heads=96", "model.num_kv_heads=8",
        "model.num_experts=128", "model.expert_hidden=3840", "gate.top_k=8", "model.vocab_size=128000",
        "model.tie_embeddings=false", "data.seq_len=4096", "data.batch_size=48000", "precision=bf16",
    ]  # fmt: skip
    code = f"""
import sys
from moeflow.cli.main import main
assert main(["plan", *{words!r}, "--device", "h100", "--ranks", "96000", "--json"]) == 0
assert "torch" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["parameters"] > 1.75e12
    assert found["held"]["dense"] + found["held"]["experts"] == found["parameters"]
