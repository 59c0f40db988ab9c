"""A block of lines at the end of a terminal's output, redrawn in place; whatever else is printed goes above it.

No alternate screen, no hidden cursor, no thread: after a kill the terminal is as usable as before, with the last lines
on it.  The cursor rests below the block, so that what the terminal itself echoes ("^C") harms nothing.
"""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from moeflow.logging import ROOT

_LINE_UP = "\x1b[1A"
_ERASE_BELOW = "\x1b[J"


class LiveBlock:
    """The block of one terminal.

    Args:
        stream: of the terminal.
        console: makes text of styles; its own file stays unused.
    """

    def __init__(self, stream: TextIO, console: Console):
        self._stream, self._console = stream, console
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._lines: list[Text] = []
        self._drawn: list[int] = []  # columns of each line that stands on the screen
        self._put_back: list[Callable[[], Any]] = []

    def size(self) -> tuple[int, int]:
        """(columns, lines) of the terminal as it is now."""
        try:
            columns, lines = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            columns, lines = 0, 0
        return columns or 80, lines or 24

    def start(self) -> None:
        """Lead standard output, standard error and log messages that go to this terminal above the block."""
        sys_stdout, sys_stderr = sys.stdout, sys.stderr
        if sys_stdout.isatty():
            sys.stdout = _Above(self, sys_stdout)
            self._put_back.append(partial(setattr, sys, "stdout", sys_stdout))
        if sys_stderr.isatty():
            sys.stderr = _Above(self, sys_stderr)
            self._put_back.append(partial(setattr, sys, "stderr", sys_stderr))
            # Their handlers hold the old stream.
            for handler in logging.getLogger(ROOT).handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is sys_stderr:
                    handler.setStream(sys.stderr)
                    self._put_back.append(partial(handler.setStream, sys_stderr))

    def show(self, lines: Sequence[Text]) -> None:
        """Replace the lines of the block; each has to fit into the terminal's columns."""
        with self._lock:
            self._lines = list(lines)
            self._write("")

    def above(self, text: str) -> None:
        """Print whole lines above the block."""
        if os.getpid() != self._process:
            # A forked data worker: the block is its parent's, and so may the lock be.
            self._stream.write(text)
            self._stream.flush()
            return
        with self._lock:
            self._write(text)

    def render(self, text: Text) -> str:
        """Text with its styles as this terminal shows them, and a newline."""
        with self._console.capture() as captured:
            self._console.print(text, markup=False, soft_wrap=True)
        return captured.get()

    def stop(self) -> None:
        """Leave the block where it stands and give the streams back; may be called again."""
        while self._put_back:
            self._put_back.pop()()
        with self._lock:
            self._drawn, self._lines = [], []

    def _write(self, above: str) -> None:
        """One write for the whole change, so that nothing flickers."""
        frame = "".join(self.render(line) for line in self._lines)
        self._stream.write(self._erase() + above + frame)
        self._stream.flush()
        self._drawn = [line.cell_len for line in self._lines]

    def _erase(self) -> str:
        if not self._drawn:
            return ""
        # A terminal that became narrower has wrapped the lines since.
        columns, height = self.size()
        rows = sum(max(1, math.ceil(length / columns)) for length in self._drawn)
        return "\r" + _LINE_UP * min(rows, height - 1) + _ERASE_BELOW


class _Above(io.TextIOBase):
    """Stands in for a stream of the terminal: whole lines go above the block."""

    def __init__(self, block: LiveBlock, stream: TextIO):
        self._block, self._stream = block, stream
        self._rest = ""

    def write(self, text: str) -> int:
        whole, newline, rest = (self._rest + text).rpartition("\n")
        self._rest = rest
        if newline:
            self._block.above(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept but a line that has no end yet, which would have to be erased again."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
