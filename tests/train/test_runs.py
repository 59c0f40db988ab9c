"""Whole runs: resumed exactly, the same on one process and two, stopped by signals, killed."""

import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moeflow.errors import ConfigError, ResourceError
from moeflow.schema import RunConfig
from moeflow.train.memory import shortage_named
from moeflow.train.session import set_threads
from tests.distributed import run_scripts
from tests.train.runs import TINY, environment, losses, moeflow, rows, summary, train


def saved_tensors(folder, step):
    """All tensors of a checkpoint, whole, whatever layout wrote it."""
    path = folder / "checkpoints" / f"step_{step:08d}"
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensors


def assert_same_run(one, other, step):
    assert rows(one) == rows(other)
    first, second = saved_tensors(one, step), saved_tensors(other, step)
    assert first.keys() == second.keys()
    assert any(key.startswith("optimizer/") for key in first)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    assert {k: v for k, v in summary(one).items() if "time" not in k} == {
        k: v for k, v in summary(other).items() if "time" not in k
    }


@pytest.mark.parametrize(
    ("words", "stop"),
    [
        # An epoch has 6 steps: the stops lie in the middle of the first one, at the end of one, and in a later one.
        ([], 4),
        (["gate=noisy", "trainer.grad_accum=2", "trainer.log_every=3"], 8),
    ],
    ids=["middle-of-epoch", "noise-accumulation-later-epoch"],
)
def test_a_resumed_run_equals_one_in_one_go(tmp_path, words, stop):
    always = ["trainer.max_steps=14", "trainer.eval_every=5", "checkpoint.every=7", *words]
    train(tmp_path / "whole", *always)
    train(tmp_path / "parts", *always, f"trainer.stop_at={stop}")
    assert summary(tmp_path / "parts")["status"] == "interrupted"
    moeflow("resume", str(tmp_path / "parts"))
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 14)


@pytest.mark.distributed
def test_cifar_moe_on_one_process_and_on_two_with_ep_2(tmp_path):
    always = ["trainer.max_steps=20", "optim.clip_norm=0.5"]
    train(tmp_path / "one", *always, recipe="cifar_moe")
    train(tmp_path / "two", *always, "launch.processes=2", "parallel.ep=2", recipe="cifar_moe")
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 20
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=0)


@pytest.mark.distributed
def test_one_process_and_two_with_ep_2_follow_the_same_losses(tmp_path):
    always = ["trainer.max_steps=20", "optim.clip_norm=0.5", "gate.random_second=false", "gate.capacity_factor=null"]
    always += ["gate.eval_capacity_factor=null"]
    train(tmp_path / "one", *always)
    train(tmp_path / "two", *always, "launch.processes=2", "parallel.ep=2")
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 20
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=0)
    # What two ranks wrote, one resumes, and the other way about.
    moeflow("resume", str(tmp_path / "two"), "trainer.max_steps=24", "launch.processes=1", "parallel.ep=1")
    moeflow("resume", str(tmp_path / "one"), "trainer.max_steps=24", "launch.processes=2", "parallel.ep=2")
    torch.testing.assert_close(
        torch.tensor(losses(tmp_path / "two")), torch.tensor(losses(tmp_path / "one")), rtol=1e-5, atol=0
    )
    # The evaluation of a checkpoint is that of the run's end.
    shown = moeflow("eval", str(tmp_path / "two")).stdout
    assert f"{summary(tmp_path / 'two')['eval/accuracy']:.4f}" in shown


@pytest.mark.distributed
def test_under_torchrun_nothing_is_spawned_and_one_folder_is_made(tmp_path):
    words = ["train", "+recipe=cifar_tutorial_moe", *TINY, "parallel.ep=2", f"run.root={tmp_path}"]
    done = run_scripts(["-m", "moeflow", *words, "trainer.max_steps=3"], 2, timeout=90)
    (folder,) = (tmp_path / "cifar_tutorial_moe").iterdir()
    assert len(losses(folder)) == 3
    assert "processes  2, started by torchrun" in done[0].output
    assert "step" not in done[1].output


@pytest.mark.distributed
def test_ranks_that_do_not_find_one_another(tmp_path):
    two = ("launch.processes=2", "parallel.ep=2", "launch.timeout_s=0.0001")
    done = train(tmp_path / "run", *two, check=False)
    assert done.returncode == 2
    assert "did not find one another at 127.0.0.1:" in done.stderr
    assert "launch.timeout_s=0.0001" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.distributed
def test_moeflow_says_that_it_started_the_ranks_itself(tmp_path):
    done = train(tmp_path / "run", "launch.processes=2", "parallel.ep=2", "trainer.max_steps=1")
    assert "processes  2, started by moeflow" in done.stdout


def started(folder, *words):
    """A run that would take minutes, once it has logged its third step."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "moeflow", "train", "+recipe=cifar_tutorial_moe", *TINY),
            *("launch.processes=1", "parallel.ep=1", "trainer.max_steps=100000", f"run.dir={folder}", *words),
        ],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 90
    while not (folder / "metrics.jsonl").is_file() or len(rows(folder)) < 3:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number):
    folder = tmp_path / "run"
    process = started(folder)
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in said
    assert f"moeflow resume {folder}" in said
    steps = [row["step"] for row in rows(folder) if "loss" in row]
    assert summary(folder)["status"] == "interrupted"
    assert summary(folder)["step"] == steps[-1]
    moeflow("resume", str(folder), f"trainer.max_steps={steps[-1] + 2}")
    assert [row["step"] for row in rows(folder) if "loss" in row] == list(range(1, steps[-1] + 3))


def test_a_kill_leaves_the_last_good_checkpoint(tmp_path):
    folder = tmp_path / "run"
    process = started(folder, "checkpoint.every=1")
    process.kill()
    process.communicate()
    saved = sorted((folder / "checkpoints").glob("step_????????"))
    assert saved
    last = int(saved[-1].name[5:])
    done = moeflow("resume", str(folder), f"trainer.max_steps={last + 3}")
    assert f"from step {last}" in done.stdout
    assert [row["step"] for row in rows(folder) if "loss" in row] == list(range(1, last + 4))


def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(tmp_path):
    folder = tmp_path / "run"
    train(folder, "trainer.max_steps=6", "checkpoint.every=3")
    (shard,) = (folder / "checkpoints" / "step_00000006").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    before = {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*") if path.name != ".lock"}
    done = moeflow("resume", str(folder), "trainer.max_steps=8", check=False)
    assert done.returncode == 2
    assert shard.name in done.stderr
    assert "3" in done.stderr.split("mend:")[1]
    assert "Traceback" not in done.stderr
    assert before == {
        path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*") if path.name != ".lock"
    }


def test_a_loss_that_is_not_finite_ends_the_run_with_one_message(tmp_path):
    words = ("optim.lr=1e30", "trainer.max_steps=50", "optim.clip_norm=null")
    done = train(tmp_path / "run", *words, check=False)
    assert done.returncode == 4
    assert "gradient norm is" in done.stderr
    assert "start anew with optim.lr=1e+29" in done.stderr
    assert "Traceback" not in done.stderr
    done = train(tmp_path / "saved", *words, "checkpoint.every=1", check=False)
    assert f"moeflow resume {tmp_path / 'saved'} optim.lr=1e+29 goes on from step" in done.stderr


def test_a_resume_that_cannot_run_leaves_the_configuration(tmp_path):
    folder = tmp_path / "run"
    train(folder, "trainer.max_steps=2")
    for words in (("--force", "model.num_experts=32"), ("launch.threads=100000",)):
        done = moeflow("resume", str(folder), "trainer.max_steps=3", *words, check=False)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    moeflow("resume", str(folder), "trainer.max_steps=4")
    assert summary(folder)["step"] == 4


def test_other_data_than_the_checkpoints_are_refused(tmp_path):
    for name, factor in (("here", 1), ("there", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text").write_text("".join(chr(97 + (i * i * factor) % 23) for i in range(4000)))
    folder = tmp_path / "run"
    words = ["+recipe=gpt_moe", "model.num_layers=1", "data.batch_size=2", "trainer.eval_batches=1", "data.path=text"]
    moeflow("train", *words, f"data.root={tmp_path / 'here'}", "trainer.max_steps=2", f"run.dir={folder}")
    done = moeflow("resume", str(folder), "trainer.max_steps=3", f"data.root={tmp_path / 'other'}", check=False)
    assert done.returncode == 2
    assert "step 2 was trained on real data" in done.stderr
    assert "--force with these" in done.stderr
    moeflow("resume", str(folder), "trainer.max_steps=3", f"data.root={tmp_path / 'there'}")
    shown = moeflow("eval", str(folder), f"data.root={tmp_path / 'other'}")
    assert "data             text:text (real)" in shown.stdout
    assert "other data than those of the training" in shown.stderr
    moeflow("resume", str(folder), "trainer.max_steps=4", f"data.root={tmp_path / 'other'}", "--force")
    assert summary(folder)["step"] == 4


@pytest.mark.distributed
def test_ranks_whose_starter_was_killed_save_and_stop(tmp_path):
    folder = tmp_path / "run"
    process = started(folder, "launch.processes=2", "parallel.ep=2")
    process.kill()
    # Their output ends when the last of them has ended.
    said, _ = process.communicate(timeout=60)
    assert "SIGTERM: saving after this step" in said
    steps = [row["step"] for row in rows(folder) if "loss" in row]
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{steps[-1]:08d}\n"
    assert summary(folder)["status"] == "interrupted"


def test_checkpoints_that_somebody_still_writes_are_left_alone(tmp_path):
    folder = tmp_path / "run"
    train(folder, "trainer.max_steps=2")
    before = (folder / "metrics.jsonl").read_bytes()
    script = f"""
import time
from moeflow.train.shelf import Shelf
shelf = Shelf({str(folder / "checkpoints")!r})
shelf.claim()
print("ready", flush=True)
time.sleep(60)
"""
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert writer.stdout.readline() == "ready\n"
        done = moeflow("resume", str(folder), "trainer.max_steps=3", check=False)
    finally:
        writer.kill()
        writer.communicate()
    assert done.returncode == 2
    assert f"is in use: another run writes its checkpoints there (process {writer.pid} on" in done.stderr
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_memory_that_is_not_there(tmp_path):
    done = train(tmp_path / "run", "model.num_experts=1000000", check=False)
    assert done.returncode == 2
    assert re.search(r"model.num_experts=1000000\) take at least [\d,.]+ GiB, and .* GiB free", done.stderr)
    assert "Traceback" not in done.stderr
    for size in (2**60, 2**62):
        with pytest.raises(ResourceError, match=r"memory ran out: .*\n  mend: fewer experts"), shortage_named():
            torch.empty(size, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="must match"), shortage_named():
        torch.ones(2) + torch.ones(3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("model=gpt", "model.vocab_size=256"),
            "model=gpt predicts tokens, and data=cifar10 has none\n  mend: data=text",
        ),
        (("data=text",), "model=lenet predicts classes, and data=text has none\n  mend: data=cifar10"),
    ],
)
def test_a_model_and_data_of_two_kinds(tmp_path, words, said):
    done = moeflow(
        *("train", "+recipe=cifar_tutorial_moe", *words, "launch.processes=1", "parallel.ep=1"),
        *("data.source=synthetic", "trainer.max_steps=1", f"run.dir={tmp_path / 'run'}"),
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr


def test_numbers_of_threads_that_cannot_be(monkeypatch):
    config = RunConfig()
    for text in ("many", "0", "-1", "", "1.5"):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS='{text}' must be"):
            set_threads(config)
    config.launch.threads = 100_000
    with pytest.raises(ConfigError, match=r"launch\.threads=100000: .* at most the"):
        set_threads(config)


def test_openmp_knows_a_number_for_each_level_of_nesting(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1,2")
    try:
        set_threads(RunConfig())
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
