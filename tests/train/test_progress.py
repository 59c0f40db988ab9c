from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from moeflow.train.progress import Progress, format_duration, format_metrics
from tests.distributed import ROOT
from tests.terminal import Program
from tests.train.runs import TINY

pytestmark = pytest.mark.timeout(60)

RUN = """
    import logging as standard, sys, time
    from moeflow import logging
    from moeflow.train.progress import Progress
    logging.setup(VERBOSITY)
    progress = Progress(200, verbosity=VERBOSITY, rank=RANK)
    progress.banner([("device", "cpu"), ("backends", "top_k torch (no GPU), " * 8 + "end")])
    for step in range(1, 201):
        time.sleep(0.003)
        row = {"loss": 1.0 / step, "accuracy": 0.5, "lr": 1e-3, "samples_per_s": 1234.0, "grad_norm": 2.0}
        loads = {"blocks.5.mlp": [4, 4, 4, 4], "blocks.7.mlp": [8, 0, 4, 4]}
        progress.update(step, *((row, loads) if step % 50 == 0 else ()))
        if step == 75:
            logging.get_logger("moeflow.test").warning("a message of the log")
            print("a line from elsewhere")
        if step == 100:
            progress.evaluation(step, {"eval/loss": 0.25, "eval/accuracy": 0.82314})
    progress.finish([("result", "accuracy 82.3%"), ("next", "moeflow eval outputs/x")])
    print("after the end", file=sys.stderr)
"""


def source(verbosity: int = 0, rank: int = 0) -> list[str]:
    text = textwrap.dedent(RUN).replace("VERBOSITY", str(verbosity)).replace("RANK", str(rank))
    return [sys.executable, "-c", text]


def environment(**changes: str) -> dict[str, str]:
    hidden = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
    clean = {key: value for key, value in os.environ.items() if key not in hidden}
    return {**clean, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **changes}


def program(columns: int = 100, rows: int = 24, changes: dict[str, str] | None = None, **arguments: int) -> Program:
    return Program(source(**arguments), environment(**(changes or {})), columns, rows)


def blocks(lines: list[str]) -> list[int]:
    """Where live views stand among the lines."""
    return [number for number, line in enumerate(lines) if line.startswith("step ")]


@pytest.mark.parametrize(("columns", "rows"), [(40, 24), (100, 24), (100, 7), (12, 3)])
def test_a_terminal_shows_one_live_view_below_what_stays(columns, rows):
    terminal = program(columns, rows)
    lines = terminal.end()
    assert terminal.process.returncode == 0, lines
    assert len(blocks(lines)) == 1, "one view, redrawn in place"
    start = blocks(lines)[0]
    assert lines[start].startswith("step 200/200"[: columns - 2])
    assert terminal.received.count(b"step ") > 3, "it was redrawn while the run went on"
    assert terminal.received.count(b"\x1b[?") == 0, "no mode of the terminal was changed"
    if columns < 40:
        return
    for stays in ("a message of the log", "a line from elsewhere", "eval 100/200  loss 0.2500  accuracy 82.31%"):
        assert lines.count(stays[:columns].rstrip()) == 1
        assert lines.index(stays[:columns].rstrip()) < start
    assert lines[-4:] == ["result  accuracy 82.3%", "next    moeflow eval outputs/x", "after the end", ""]
    view = lines[start:-4]
    assert len(view) <= rows - 2
    assert all(len(line) < columns for line in lines[start:-4])
    if (columns, rows) == (100, 24):
        assert "100%  eta 0:00" in view[0]
        assert view[1] == "loss 0.0050  acc 50.0%  lr 1.0e-03  1,234 samples/s"
        assert view[2].startswith("loss             \u2588")
        assert view[2].endswith("0.02 .. 0.005")
        assert view[-2] == "blocks.5.mlp     \u2585\u2585\u2585\u2585  busiest 1.0x the mean"
        assert view[-1] == "blocks.7.mlp     \u2588\u00b7\u2585\u2585  busiest 2.0x the mean, dead: 1"
        assert [line[:10] for line in lines[:3]] == ["device    ", "backends  ", " " * 10], "long texts hang"


def test_verbose_keeps_a_line_of_all_metrics_for_every_row():
    lines = program(200, verbosity=1).end()
    rows = [line for line in lines if line.startswith("step ") and "loss" in line]
    assert [line.split()[1] for line in rows] == ["50/200", "100/200", "150/200", "200/200"]
    assert all("grad_norm 2.0000" in line for line in rows)


def test_quiet_is_quiet_on_a_terminal_too():
    terminal = program(verbosity=-1)
    assert terminal.end() == [
        "a message of the log", "a line from elsewhere", "result  accuracy 82.3%", "next    moeflow eval outputs/x",
        "after the end", "",
    ]  # fmt: skip
    assert b"\x1b[" not in terminal.received.replace(b"\x1b[1m", b"").replace(b"\x1b[0m", b"")


def test_no_color_takes_the_colors_and_leaves_the_view():
    terminal = program(changes={"NO_COLOR": "1"})
    assert len(blocks(terminal.end())) == 1
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]m", terminal.received)
    assert b"\x1b[J" in terminal.received
    colored = program()
    colored.end()
    assert re.search(rb"\x1b\[[0-9;]*3[0-9]m", colored.received)


def test_a_dumb_terminal_gets_plain_lines():
    terminal = program(changes={"TERM": "dumb"})
    lines = terminal.end()
    assert b"\x1b" not in terminal.received
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["50/200", "100/200", "150/200", "200/200"]


def test_a_terminal_without_unicode_gets_ascii():
    terminal = program(changes={"PYTHONIOENCODING": "ascii"})
    lines = terminal.end()
    assert terminal.received.isascii()
    assert lines[blocks(lines)[0] + 4 :][:2] == [
        "blocks.5.mlp     ====  busiest 1.0x the mean",
        "blocks.7.mlp     #.==  busiest 2.0x the mean, dead: 1",
    ]


WAITING = """
    import sys
    from moeflow.train.progress import Progress
    progress = Progress(100, clock=iter(range(10**6)).__next__)
    print("before")
    for step in range(1, 101):
        progress.update(step, {"loss": 1.0 / step}, {"moe": [1, 2, 0, 5]})
        if step % 20 == 0:
            progress.event(f"event {step}")
            print("waiting", step, file=sys.stderr)
            sys.stdin.readline()
    progress.close()
"""


def test_a_window_that_changes_its_size_keeps_one_view():
    terminal = Program([sys.executable, "-c", textwrap.dedent(WAITING)], environment())
    for step, (columns, rows) in zip((20, 40, 60, 80, 100), [(50, 24), (120, 30), (33, 12), (100, 8), (80, 24)]):
        terminal.read(lambda step=step: f"waiting {step}" in terminal.screen.lines)
        # The view is drawn anew below the line that went above it.
        terminal.read(lambda: len(blocks(terminal.screen.lines)) == 1 and terminal.screen.lines[-1] == "")
        time.sleep(0.1)
        terminal.resize(columns, rows)
        terminal.enter()
    lines = terminal.end()
    assert len(blocks(lines)) == 1
    assert [line for line in lines if line.startswith(("before", "event", "waiting"))] == [
        "before", *(f"{word} {step}" for step in (20, 40, 60, 80, 100) for word in ("event", "waiting"))
    ]  # fmt: skip
    assert lines[blocks(lines)[0] :][1:] == [
        "loss 0.0100",
        f"loss             {lines[blocks(lines)[0] + 2].split()[1]}  1 .. 0.01",
        "moe              \u2583\u2585\u00b7\u2588  busiest 2.5x the mean, dead: 2",
        "",
    ]


@pytest.mark.timeout(120)
def test_ctrl_c_in_a_real_run_leaves_the_view_and_the_way_on(tmp_path):
    words = [
        "train",
        "+recipe=cifar_tutorial_moe",
        *TINY,
        "launch.processes=1",
        "parallel.ep=1",
        f"run.dir={tmp_path}/run",
    ]
    argv = [sys.executable, "-m", "moeflow", *words, "trainer.max_steps=100000", "data.augment=false"]
    terminal = Program(argv, {**environment(), "OMP_NUM_THREADS": "1"})
    terminal.read(lambda: any(line.startswith("loss  ") for line in terminal.screen.lines), timeout_s=60)
    os.killpg(terminal.process.pid, signal.SIGINT)
    lines = terminal.end(60)
    assert terminal.process.returncode == 130
    assert len(blocks(lines)) == 1
    start = blocks(lines)[0]
    assert any(line.startswith("SIGINT: saving after this step") for line in lines[:start])
    assert any(line.startswith("network.experts") or "busiest" in line for line in lines[start:])
    assert any(line.startswith("next     moeflow resume") for line in lines[start:])
    assert terminal.received.count(b"\x1b[?") == 0


def piped(verbosity: int = 0, rank: int = 0, **changes: str) -> tuple[list[str], str]:
    done = subprocess.run(
        source(verbosity, rank), env=environment(**changes), capture_output=True, text=True, timeout=50, check=True
    )
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout
    return done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("changes", [{}, {"FORCE_COLOR": "1"}], ids=str)
def test_a_pipe_gets_plain_lines_for_logged_rows_alone(changes):
    lines, errors = piped(**changes)
    assert lines[0] == "device    cpu"
    assert lines[1] == "backends  " + "top_k torch (no GPU), " * 8 + "end"
    assert [line.split()[1] for line in lines if line.startswith("step")] == [
        "50/200", "100/200", "150/200", "200/200",
    ]  # fmt: skip
    assert lines[-2:] == ["result  accuracy 82.3%", "next    moeflow eval outputs/x"]
    assert errors == "a message of the log\nafter the end\n"


def test_quiet_says_only_the_end():
    lines, _ = piped(verbosity=-1)
    assert lines == ["a line from elsewhere", "result  accuracy 82.3%", "next    moeflow eval outputs/x"]


def test_other_ranks_are_silent():
    lines, _ = piped(rank=1)
    assert lines == ["a line from elsewhere"]


def test_a_reader_that_goes_away_does_not_end_the_run():
    process = subprocess.Popen(source(), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(30) == 0, errors
    assert errors.count("no more progress lines, training goes on") == 1
    assert errors.endswith("after the end\n")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_eta_is_the_mean_pace_after_the_first_step_of_this_process():
    clock, stream = Clock(), io.StringIO()
    progress = Progress(1000, start_step=400, stream=stream, clock=clock)
    clock.now = 50.0  # a slow first step
    progress.update(401, {"loss": 1.0})
    for step in range(402, 502):
        clock.now += 2.0
        progress.update(step, {"loss": 1.0} if step == 501 else None)
    first, last = stream.getvalue().splitlines()
    assert first == "step  401/1000  loss 1.0000"
    assert last == f"step  501/1000  loss 1.0000  eta {format_duration(499 * 2.0)}"


def test_numbers_are_short_and_odd_ones_readable():
    row = {"step": 3, "grad_norm": 1e-7, "loss": float("nan"), "lr": 9.87e-4, "tokens_per_s": 12345.6, "note": "x"}
    assert format_metrics(row) == "loss nan  lr 9.9e-04  12,346 tokens/s"
    assert format_metrics(row, all_keys=True).endswith("grad_norm 1.000e-07")
    assert [format_duration(s) for s in (0, 59.6, 3599, 3661, 90061)] == [
        "0:00",
        "1:00",
        "59:59",
        "1:01:01",
        "1d 01:01:01",
    ]


def test_curves_of_a_resumed_run_begin_with_its_first_row(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    stream.isatty = lambda: True
    progress = Progress(10, start_step=2, stream=stream)
    progress.remember(iter([{"step": 1, "loss": 8.0}, {"step": 2, "loss": 4.0}]))
    progress.update(3, {"loss": 2.0})
    progress.close()
    assert "8 .. 2" in stream.getvalue()
