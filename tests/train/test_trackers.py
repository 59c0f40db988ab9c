from __future__ import annotations

import json
import logging
import struct
import sys
import threading
import time

import pytest
import torch

from moeflow.train import trackers
from moeflow.train.trackers import TrackedRun, Trackers


def tracked(tmp_path, **changes) -> TrackedRun:
    settings = {
        "name": "cifar_moe",
        "config": {"model": {"num_experts": 8}, "run": {"seed": 1}},
        "facts": {"data": "synthetic", "recipe": "cifar_moe"},
    }
    return TrackedRun(tmp_path, **{**settings, **changes})


def warnings_of(caplog) -> list[str]:
    records = [record for record in caplog.records if record.name.startswith("moeflow")]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def _propagate(monkeypatch):
    monkeypatch.setattr(logging.getLogger("moeflow"), "propagate", True)


def tensorboard_of(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_holds_rows_config_and_the_kind_of_data(tmp_path):
    all_trackers = Trackers(["tensorboard"], tracked(tmp_path))
    for step in (1, 2, 3):
        all_trackers.log({"step": step, "loss": torch.tensor(1.0 / step), "note": "text", "load": [1, 2]})
    all_trackers.log({"step": 3, "eval/accuracy": 0.5})
    all_trackers.end_training({"accuracy": 0.5})
    events = tensorboard_of(tmp_path)
    assert events.Tags()["scalars"] == ["loss", "eval/accuracy"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)),
    ]  # fmt: skip
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts["data/text_summary"] == "synthetic"
    assert '"num_experts": 8' in texts["config/text_summary"]
    assert '"accuracy": 0.5' in texts["summary/text_summary"]


def test_tensorboard_hides_the_rows_that_a_resumed_run_does_again(tmp_path):
    first = Trackers(["tensorboard"], tracked(tmp_path))
    for step in range(1, 9):
        first.log({"step": step, "loss": 100.0})
    first.end_training()
    time.sleep(1.1)  # event files of one second share a name but for the host
    second = Trackers(["tensorboard"], tracked(tmp_path, resume_step=5))
    for step in range(6, 11):
        second.log({"step": step, "loss": 1.0})
    second.end_training()
    events = tensorboard_of(tmp_path).Scalars("loss")
    assert [event.step for event in events] == list(range(1, 11))
    assert [event.value for event in events][5:] == [1.0] * 5


# --- Weights & Biases, for real and offline --------------------------------------------------------------------------


def records_of(path) -> list[bytes]:
    """Records of a W&B transaction log: LevelDB's log format (32 KiB blocks) after a header of 7 bytes."""
    data, records, part, at = path.read_bytes(), [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + length]
        if kind in (1, 4):  # whole, or the last part
            records.append(part)
            part = b""
        at += 7 + length
    return records


def read_offline_run(path) -> tuple:
    """Run record, history rows and config of an offline run."""
    from wandb.proto import wandb_internal_pb2 as pb

    run, config, rows = None, {}, []
    for data in records_of(path):
        record = pb.Record.FromString(data)
        if record.HasField("run"):
            run = record.run
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return run, rows, config


@pytest.mark.timeout(110)
def test_wandb_offline_for_real_and_a_resume_goes_on_with_the_same_run(tmp_path, capfd):
    pytest.importorskip("wandb")
    for first, last, resumed in ((1, 3, None), (3, 5, 2)):
        all_trackers = Trackers(["wandb"], tracked(tmp_path, resume_step=resumed))
        for step in range(first, last + 1):
            all_trackers.log({"step": step, "loss": 1.0 / step, "bad": float("nan")})
        all_trackers.end_training({"accuracy": 0.5}, timeout_s=50)
        time.sleep(1.1)  # run folders are named by the second
    logs = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(logs) == 2
    (run1, rows1, config), (run2, rows2, _) = map(read_offline_run, logs)
    assert run1.run_id == run2.run_id == logs[0].stem.removeprefix("run-")
    assert (run1.project, run1.display_name) == ("moeflow", "cifar_moe")
    assert set(run1.tags) == {"data:synthetic", "recipe:cifar_moe"}
    assert config["facts"] == {"data": "synthetic", "recipe": "cifar_moe"}
    assert config["model"] == {"num_experts": 8}
    assert [(row["step"], row["loss"]) for row in rows1] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert [row["step"] for row in rows2] == [3, 4, 5]
    said = capfd.readouterr()
    assert "wandb" not in said.out + said.err, "it says nothing of its own on the terminal"


def test_wandb_without_a_key_is_switched_off_instead_of_asking(tmp_path, caplog, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    all_trackers = Trackers(["wandb"], tracked(tmp_path, mode="online"))
    all_trackers.log({"step": 1})
    all_trackers.end_training(timeout_s=50)
    (warning,) = warnings_of(caplog)
    assert "tracker wandb is off" in warning
    assert "wandb login" in warning


# --- trackers that misbehave -----------------------------------------------------------------------------------------


class Misbehaving:
    """Stands in for `wandb` or its run: raises in the call named `fails`."""

    def __init__(self, fails: str, error: BaseException):
        self.fails, self.error = fails, error
        self.url, self.dir, self.summary, self.calls = "", "x/y", {}, []

    def __getattr__(self, name: str):
        def call(*args, **kwargs):
            self.calls.append(name)
            if name == self.fails:
                raise self.error
            return self

        return call


@pytest.mark.parametrize("error", [RuntimeError("no network"), SystemExit(1), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("fails", ["setup", "init", "define_metric", "log", "finish"])
def test_nothing_that_a_tracker_raises_reaches_training(tmp_path, caplog, monkeypatch, fails, error):
    fake = Misbehaving(fails, error)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    all_trackers = Trackers(["wandb", "tensorboard"], tracked(tmp_path))
    for step in range(1, 6):
        all_trackers.log({"step": step, "loss": 1.0})
    all_trackers.end_training()
    assert len(warnings_of(caplog)) == 1, "one warning, not one a row"
    assert type(error).__name__ in warnings_of(caplog)[0]
    assert fake.calls.count(fails) == 1
    assert len(tensorboard_of(tmp_path).Scalars("loss")) == 5, "the other tracker goes on"


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_says_what_to_install(tmp_path, caplog, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    all_trackers = Trackers([name], tracked(tmp_path))
    all_trackers.log({"step": 1})
    all_trackers.end_training()
    (warning,) = warnings_of(caplog)
    assert f"pip install {name}" in warning


class Slow:
    def __init__(self, run):
        self.started.set()
        time.sleep(0.5)

    started = threading.Event()
    rows: list = []

    def log(self, row):
        self.rows.append(row)

    def end(self, summary, exit_code):
        self.rows.append((summary, exit_code))


def test_a_slow_start_delays_nothing_and_loses_no_row(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.FACTORIES, "wandb", Slow)
    all_trackers = Trackers(["wandb"], tracked(tmp_path))
    assert not Slow.started.is_set(), "nothing is opened before the first row"
    before = time.perf_counter()
    for step in (1, 2):
        all_trackers.log({"step": step})
    assert time.perf_counter() - before < 0.25
    all_trackers.end_training({"a": 1}, exit_code=3)
    assert Slow.rows == [{"step": 1}, {"step": 2}, ({"a": 1}, 3)]


def test_a_tracker_that_hangs_does_not_keep_the_run_from_ending(tmp_path, caplog, monkeypatch):
    class Hanging(Slow):
        def end(self, summary, exit_code):
            time.sleep(30)

    monkeypatch.setitem(trackers.FACTORIES, "wandb", Hanging)
    all_trackers = Trackers(["wandb"], tracked(tmp_path))
    all_trackers.log({"step": 1})
    before = time.perf_counter()
    all_trackers.end_training(timeout_s=1.0)
    assert time.perf_counter() - before < 5
    assert "did not end within 1 s" in warnings_of(caplog)[0]


def test_other_ranks_and_no_trackers_start_nothing(tmp_path):
    before = threading.active_count()
    for names, rank in ((["wandb", "tensorboard"], 1), ([], 0)):
        all_trackers = Trackers(names, tracked(tmp_path), rank=rank)
        all_trackers.log({"step": 1})
        all_trackers.end_training()
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_every_tracker_of_the_schema_has_a_factory():
    import dataclasses

    from moeflow.schema import TrackerConfig

    (names,) = [f for f in dataclasses.fields(TrackerConfig) if f.name == "names"]
    assert set(names.metadata["choices"]) == set(trackers.FACTORIES)
