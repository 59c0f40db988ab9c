from __future__ import annotations

import csv
import json
import multiprocessing
import os
import random
import subprocess
import time

import pytest
import torch

from moeflow.errors import MoeflowError
from moeflow.train.metrics import TIMING, MetricsLog, read_rows, without_timing
from tests.train.forked import start


def row(step: int) -> dict:
    values = {"step": step, "loss": 1.0 / step, "lr": torch.tensor(0.1, dtype=torch.float64), "time_s": time.time()}
    return {**values, "eval/accuracy": step / 1000} if step % 10 == 0 else values


def texts(run_dir) -> tuple[list, list]:
    """Rows of both files without their timing."""
    rows = [without_timing(item) for item in read_rows(run_dir / "metrics.jsonl")]
    with open(run_dir / "metrics.csv", newline="") as stream:
        return rows, [without_timing(item) for item in csv.DictReader(stream)]


def run(run_dir, first: int, last: int, resume_step: int | None = None) -> None:
    log = MetricsLog(run_dir, resume_step)
    for step in range(first, last + 1):
        log.log(row(step))
    log.close()


def test_both_files_hold_the_same_rows_and_columns_grow(tmp_path):
    run(tmp_path, 1, 25)
    rows, table = texts(tmp_path)
    assert [item["step"] for item in rows] == list(range(1, 26))
    assert list(table[0]) == ["step", "loss", "lr", "eval/accuracy"]
    assert [item["eval/accuracy"] for item in table[8:11]] == ["", "0.01", ""]
    assert all(float(a["loss"]) == b["loss"] for a, b in zip(table, rows, strict=True)), "every digit is kept"
    assert rows[0]["lr"] == 0.1


def test_every_row_is_on_disk_when_log_returns(tmp_path):
    log = MetricsLog(tmp_path)
    for step in (1, 2):
        log.log({"step": step, "loss": 2.0})
        assert (tmp_path / "metrics.jsonl").read_text().endswith(f'{{"step": {step}, "loss": 2.0}}\n')
        assert (tmp_path / "metrics.csv").read_text().endswith(f"{step},2.0\n")


@pytest.mark.parametrize("overrun", [0, 1, 37])
def test_one_go_and_a_resume_leave_the_same_rows(tmp_path, overrun):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    run(whole, 1, 200)
    run(parts, 1, 100 + overrun)
    run(parts, 101, 200, resume_step=100)
    assert texts(whole) == texts(parts)
    discarded = parts / "metrics.discarded.jsonl"
    steps = [item["step"] for item in read_rows(discarded)] if discarded.exists() else []
    assert steps == list(range(101, 101 + overrun))


def test_a_second_start_without_a_checkpoint_begins_with_empty_files(tmp_path):
    run(tmp_path, 1, 5)
    run(tmp_path, 1, 2)
    assert [item["step"] for item in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
    assert len(list(read_rows(tmp_path / "metrics.discarded.jsonl"))) == 5


@pytest.mark.parametrize("tail", [b'{"step": 4, "lo', b'{"step": 4}', b"\x00\x00\x00", b"[1]\n"])
def test_a_torn_last_line_is_moved_out(tmp_path, tail, caplog):
    run(tmp_path, 1, 3)
    with open(tmp_path / "metrics.jsonl", "ab") as stream:
        stream.write(tail)
    assert [item["step"] for item in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    run(tmp_path, 4, 5, resume_step=3)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert (tmp_path / "metrics.discarded.jsonl").read_bytes() == tail.rstrip(b"\n") + b"\n"
    assert "1 torn line" in caplog.text


def write_forever(run_dir, connection) -> None:
    log = MetricsLog(run_dir, 0)
    connection.send("ready")
    for step in range(1, 1_000_000):
        log.log(row(step))
        connection.send(step)


def test_kills_lose_no_row_that_was_logged(tmp_path):
    draw = random.Random(1)
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        ours, theirs = multiprocessing.Pipe()
        process = start(write_forever, str(folder), theirs)
        theirs.close()
        assert ours.recv() == "ready"
        deadline = time.monotonic() + draw.uniform(0.01, 0.06)
        last = 0
        while time.monotonic() < deadline or not last:  # a busy machine may take longer to the first row
            last = ours.recv() if ours.poll(0.001) else last
        process.kill()
        process.join()
        steps = [item["step"] for item in read_rows(folder / "metrics.jsonl")]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= last > 0
        MetricsLog(folder, last).close()
        assert [item["step"] for item in texts(folder)[0]] == list(range(1, last + 1))


def test_what_json_does_not_know_stays_readable(tmp_path):
    log = MetricsLog(tmp_path)
    log.log({"step": 1, "loss": float("nan"), "grad_norm": float("-inf"), "load": [1, 2], "note": None})
    text = (tmp_path / "metrics.jsonl").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (read,) = read_rows(tmp_path / "metrics.jsonl")
    assert read == {"step": 1, "loss": "NaN", "grad_norm": "-Infinity", "load": [1, 2], "note": None}
    assert float(read["grad_norm"]) == float("-inf")
    assert (tmp_path / "metrics.csv").read_text().splitlines()[1] == '1,NaN,-Infinity,"[1, 2]",'


def test_other_ranks_write_nothing(tmp_path):
    log = MetricsLog(tmp_path, rank=1)
    log.log({"step": 1})
    log.write_summary({"a": 1})
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_summary_is_replaced_in_one_step(tmp_path):
    log = MetricsLog(tmp_path)
    log.write_summary({"accuracy": 0.5})
    log.write_summary({"accuracy": torch.tensor(0.75), "folder": tmp_path})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"accuracy": 0.75, "folder": str(tmp_path)}
    assert not list(tmp_path.glob("summary.json.*"))


def log_many(log: MetricsLog, count: int) -> None:
    for step in range(1, count + 1):
        log.log(row(step))


def test_a_full_disk_is_named_and_the_files_go_on_later(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(disk)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        log = MetricsLog(disk)
        with pytest.raises(MoeflowError, match=r"metrics.jsonl cannot be written: No space left") as caught:
            log_many(log, 10_000)
        assert f"moeflow resume {disk}" in caught.value.mend
        os.truncate(disk / "metrics.csv", 0)
        os.truncate(disk / "metrics.jsonl", (disk / "metrics.jsonl").stat().st_size // 4)
        resumed = MetricsLog(disk, 20)
        resumed.log(row(21))
        assert [item["step"] for item in texts(disk)[0]] == list(range(1, 22))
        resumed.close()
        log._jsonl.close(), log._csv.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_timing_keys_are_the_ones_the_files_use():
    assert {"time_s", "samples_per_s", "tokens_per_s"} <= TIMING
    assert not {"step", "loss", "lr", "grad_norm", "eval/accuracy"} & TIMING
