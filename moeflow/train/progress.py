"""What a run shows: a banner, a live view on a terminal or plain lines elsewhere, and the next useful command.

device     cpu, 2 threads
layout     world 2 = dp 2, ep 2
step   120/1000  loss 1.2345  acc 45.1%  lr 9.9e-04  1,234 samples/s  eta 12:34

The live view is `moeflow.train.view`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from moeflow.logging import get_logger
from moeflow.train.duration import format_duration
from moeflow.train.live import LiveBlock
from moeflow.train.view import ASCII, BLOCKS, View

logger = get_logger(__name__)
REFRESH_S = 0.1
#: Lines that the live view takes at most.
MOST_LINES = 12

#: Keys that the line shows, in this order; `verbose` shows every number.
SHOWN = ("loss", "accuracy", "perplexity", "lr", "samples_per_s", "tokens_per_s")
_RATES = {"samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}


class Progress:
    """Speaks on rank 0; silent on all others.

    Args:
        total_steps: last step of the run.
        start_step: steps done before, in a resumed run.
        verbosity: -1 nothing but the end, 0 the usual, 1 all metrics, and a line of its own for every logged row.
        rank: of this process.
        stream: standard output by default.  On a terminal there is a live view, unless TERM is "dumb"; NO_COLOR takes
            its colors.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        verbosity: int = 0,
        rank: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total_steps, self.verbosity = total_steps, verbosity
        self._stream = stream or sys.stdout
        self._clock = clock
        self._speaks = rank == 0
        self._terminal = self._stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
        self._console = _Console(file=self._stream, force_terminal=self._terminal, highlight=False, soft_wrap=True)
        self._live: LiveBlock | None = None
        self._view = View(total_steps)
        self._signs = BLOCKS if self._console.encoding.lower().startswith("utf") else ASCII
        self._step = start_step
        self._row: Mapping[str, Any] = {}
        self._pace = _Pace(start_step)
        self._refreshed = float("-inf")

    def banner(self, lines: Sequence[tuple[str, str]]) -> None:
        """Print (label, text) pairs, aligned."""
        if self.verbosity >= 0:
            self._pairs(lines)

    def remember(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take the rows that a resumed run logged before into the curves."""
        if self._terminal and self._speaks and self.verbosity >= 0:
            for row in rows:
                self._view.add(row)

    def update(
        self, step: int, row: Mapping[str, Any] | None = None, loads: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Tell that `step` is done.

        Args:
            step: optimizer steps done.
            row: metrics of the step, on steps that are logged: the line goes on showing the last ones.
            loads: choices of each expert in that step, by layer.
        """
        self._pace.mark(step, self._clock())
        self._step = step
        if row is not None:
            self._row = row
            self._view.add(row, loads)
        if not self._speaks or self.verbosity < 0:
            return
        if row is not None and (self.verbosity > 0 or not self._terminal):
            self._say(self._line(step))
        if self._terminal and (self._clock() - self._refreshed >= REFRESH_S or step >= self.total_steps):
            self._refresh()

    def event(self, text: str) -> None:
        """Print a line that stays, such as an evaluation or a checkpoint."""
        if self.verbosity >= 0:
            self._say(text)

    def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of an evaluation ("eval/..." keys) as a line that stays."""
        self._view.add(metrics)
        text = format_metrics(metrics, all_keys=True).replace("eval/", "")
        self.event(f"eval {step:>{self._width}}/{self.total_steps}  {text}")

    def finish(self, lines: Sequence[tuple[str, str]] = ()) -> None:
        """End the live line and print (label, text) pairs: the result, and the next useful command."""
        self.close()
        self._pairs(lines)

    def close(self) -> None:
        """Give the terminal back; call it in `finally`.  May be called again."""
        if self._live is not None:
            if self._speaks:
                # Steps may have been done since; what stays on the screen is to be the last state.
                self._refresh()
            self._live.stop()
            self._live = None

    @property
    def _width(self) -> int:
        return len(str(self.total_steps))

    def _line(self, step: int) -> str:
        eta = f"  {self._eta()}" if self._eta() else ""
        return f"step {step:>{self._width}}/{self.total_steps}  {self._metrics()}{eta}"

    def _eta(self) -> str:
        remaining = self._pace.remaining_s(self.total_steps)
        return "" if remaining is None else f"eta {format_duration(remaining)}"

    def _metrics(self) -> str:
        return format_metrics(self._row, all_keys=self.verbosity > 0)

    def _refresh(self) -> None:
        """Draw the live view anew, as the terminal is now."""
        self._refreshed = self._clock()
        if self._live is None:
            self._live = LiveBlock(self._stream, self._console)
            self._live.start()
        columns, lines = self._live.size()
        # A line as wide as the terminal would leave the cursor in between two of them.
        content = self._view.lines(
            self._step, self._metrics(), self._eta(), columns - 1, max(1, min(MOST_LINES, lines - 2)), self._signs
        )
        with self._guard():
            self._live.show(content)

    def _pairs(self, lines: Sequence[tuple[str, str]]) -> None:
        width = max((len(label) for label, _ in lines), default=0) + 2
        columns = shutil.get_terminal_size().columns if self._terminal else 10_000
        for label, text in lines:
            wrapped = textwrap.wrap(text, max(20, columns - width), break_on_hyphens=False, break_long_words=False)
            for number, part in enumerate(wrapped or [""]):
                self._say(Text.assemble((f"{label if number == 0 else '':<{width}}", "bold"), part))

    def _say(self, text: str | Text) -> None:
        if self._speaks:
            with self._guard():
                if self._live is None:
                    self._console.print(text, markup=False)
                else:
                    self._live.above(self._live.render(text if isinstance(text, Text) else Text(text)))

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """A reader that went away (`| head`, a closed terminal) ends the show, not the run."""
        try:
            yield
        except OSError as exc:
            self._speaks = False
            logger.warning("standard output is gone (%s): no more progress lines, training goes on", exc.strerror)
            with contextlib.suppress(OSError, ValueError):
                # Or the interpreter's last flush of what is left in the buffer would fail once more.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))  # rich itself would end the process


class _Pace:
    """Mean time of a step since the first one, evaluations and checkpoints included, as they will come again."""

    def __init__(self, start_step: int):
        self._first: tuple[int, float] | None = None
        self._last = (start_step, 0.0)

    def mark(self, step: int, now: float) -> None:
        # From the end of the first step: it holds the warm-up.
        self._first = self._first or (step, now)
        self._last = (step, now)

    def remaining_s(self, total_steps: int) -> float | None:
        if self._first is None or self._last[0] <= self._first[0]:
            return None
        per_step = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return max(0, total_steps - self._last[0]) * per_step


def format_metrics(row: Mapping[str, Any], *, all_keys: bool = False) -> str:
    """Return "loss 1.2345  acc 45.1%  ..." of a row: the keys of `SHOWN`, then all others if asked."""
    keys = [key for key in SHOWN if key in row]
    if all_keys:
        keys += [key for key in row if key not in SHOWN and key != "step"]
    return "  ".join(_format(key, row[key]) for key in keys if isinstance(row[key], (int, float)))


def _format(key: str, value: float) -> str:
    if key in _RATES:
        return f"{value:,.0f} {_RATES[key]}" if value >= 100 else f"{value:.3g} {_RATES[key]}"
    if key == "accuracy":
        return f"acc {100 * value:.1f}%"
    if key.endswith("/accuracy"):
        return f"{key} {100 * value:.2f}%"
    if key == "lr":
        return f"lr {value:.1e}"
    if isinstance(value, int):
        return f"{key} {value}"
    return f"{key} {value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{key} {value:.3e}"
