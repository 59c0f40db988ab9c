from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import textwrap

import pytest

from moeflow.train.progress import Progress, format_duration, format_metrics
from tests.distributed import ROOT

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
        progress.update(step, row if step % 50 == 0 else None)
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


def in_terminal(columns: int = 100, **arguments: int) -> bytes:
    """What a terminal of that width receives from the run."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        source(**arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=environment(), close_fds=True
    )
    os.close(theirs)
    received = b""
    while select.select([ours], [], [], 30)[0]:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        received += data
    os.close(ours)
    assert process.wait(30) == 0, received.decode()
    return received


def screen_of(received: bytes, columns: int) -> list[str]:
    """The lines that stay on a terminal: text, carriage return, line feed, erase line, and wrapping at the edge."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\s\S]", received.decode()):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.startswith("\x1b"):
            assert re.fullmatch(r"\x1b\[(\?25[lh]|[0-9;]*m)", part), f"unknown control {part!r}"
        else:
            if column == columns:
                row, column = row + 1, 0
            while row >= len(lines):
                lines.append("")
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + 1 :]
            column += 1
        while row >= len(lines):
            lines.append("")
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("columns", [40, 100])
def test_a_terminal_shows_one_live_line_below_what_stays(columns):
    received = in_terminal(columns)
    lines = screen_of(received, columns)
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 1, "one live line, rewritten in place"
    assert steps[0].startswith("step 200/200  loss 0.0050  acc 50.0%")
    assert received.count(b"\x1b[2K") > 3, "it was rewritten while the run went on"
    assert all(len(line) <= columns for line in lines)
    assert lines.count("a message of the log") == 1
    assert lines.count("a line from elsewhere") == 1
    assert lines.count("eval 100/200  loss 0.2500  accuracy 82.31%"[:columns]) == 1
    assert lines[-2:] == ["after the end", ""]
    assert lines[-4:-2] == ["result  accuracy 82.3%", "next    moeflow eval outputs/x"]
    assert received.count(b"\x1b[?25l") == received.count(b"\x1b[?25h") == 1, "the cursor comes back"
    if columns == 100:
        assert steps[0].endswith("1,234 samples/s  eta 0:00")
        assert [line[:10] for line in lines[:3]] == ["device    ", "backends  ", " " * 10], "long texts hang"


def test_verbose_keeps_a_line_of_all_metrics_for_every_row():
    lines = screen_of(in_terminal(120, verbosity=1), 120)
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split()[1] for line in steps] == ["50/200", "100/200", "150/200", "200/200", "200/200"]
    assert all("grad_norm 2.0000" in line for line in steps)


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
