"""A terminal for tests: what stands on its screen and in its scrollback, and programs that run on one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable


class Screen:
    """Text, carriage return, line feed, cursor up, erase, and wrapping at the edge; styles are left out.

    Args:
        columns: width.
        rows: height.
    """

    def __init__(self, columns: int = 80, rows: int = 24):
        self.columns, self.rows = columns, rows
        self._lines: list[str] = [""]  # scrollback and screen
        self._wrapped: list[bool] = [False]  # whether the line goes on in the next one
        self._row = self._column = 0

    def feed(self, data: bytes) -> None:
        """Take what a program wrote."""
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\s\S]", data.decode()):
            if part == "\r":
                self._column = 0
            elif part == "\n":
                self._down(False)
            elif part == "\x1b[1A":
                # The cursor cannot leave the screen.
                self._row = max(self._row - 1, len(self._lines) - self.rows, 0)
            elif part == "\x1b[J":
                self._erase_below()
            elif part.startswith("\x1b"):
                assert re.fullmatch(r"\x1b\[[0-9;]*m", part), f"unknown control {part!r}"
            else:
                self._put(part)

    def _put(self, letter: str) -> None:
        if self._column == self.columns:
            self._down(True)
            self._column = 0
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + letter + line[self._column + 1 :]
        self._column += 1

    def _down(self, wrapped: bool) -> None:
        self._wrapped[self._row] = wrapped
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append("")
            self._wrapped.append(False)

    def _erase_below(self) -> None:
        self._lines[self._row] = self._lines[self._row][: self._column]
        del self._lines[self._row + 1 :], self._wrapped[self._row + 1 :]
        self._wrapped[self._row] = False

    def resize(self, columns: int, rows: int) -> None:
        """Become another size, and wrap lines anew, as most terminals do; the cursor is at the end then."""
        assert self._column == 0
        assert self._row == len(self._lines) - 1
        whole, line = [], ""
        for text, wrapped in zip(self._lines, self._wrapped, strict=True):
            line += text.ljust(self.columns) if wrapped else text
            if not wrapped:
                whole.append(line.rstrip())
                line = ""
        self.columns, self.rows = columns, rows
        self._lines, self._wrapped = [], []
        for text in whole:
            parts = [text[at : at + columns] for at in range(0, len(text), columns)] or [""]
            self._lines += parts
            self._wrapped += [True] * (len(parts) - 1) + [False]
        self._row = len(self._lines) - 1

    @property
    def lines(self) -> list[str]:
        """All lines from the first on, without spaces at their ends."""
        return [line.rstrip() for line in self._lines]


class Program:
    """A process whose standard streams are a terminal."""

    def __init__(self, argv: list[str], env: dict[str, str], columns: int = 100, rows: int = 24):
        self.screen = Screen(columns, rows)
        self.received = b""
        self._ours, theirs = pty.openpty()
        self._size(theirs, columns, rows)
        modes = termios.tcgetattr(theirs)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, modes)
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env, close_fds=True, start_new_session=True
        )
        os.close(theirs)

    @staticmethod
    def _size(handle: int, columns: int, rows: int) -> None:
        fcntl.ioctl(handle, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns: int, rows: int = 24) -> None:
        """As a user drags the window; the program must be waiting for input."""
        self._size(self._ours, columns, rows)
        self.screen.resize(columns, rows)

    def enter(self) -> None:
        """Send the line that the program waits for."""
        os.write(self._ours, b"\n")

    def read(self, until: Callable[[], bool] = lambda: False, timeout_s: float = 30.0) -> None:
        """Feed the screen until the condition holds, or to the end of the program."""
        deadline = time.monotonic() + timeout_s
        while not until():
            left = deadline - time.monotonic()
            assert left > 0, f"the terminal shows:\n{chr(10).join(self.screen.lines)}"
            if not select.select([self._ours], [], [], left)[0]:
                continue
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # the other end is closed
                break
            self.received += data
            self.screen.feed(self._whole(data))

    _rest = b""

    def _whole(self, data: bytes) -> bytes:
        """Up to the last whole letter and control: the rest comes with the next bytes."""
        data = self._rest + data
        cut = re.search(rb"(\x1b(\[[?0-9;]*)?|[\xc0-\xff][\x80-\xbf]{0,2})$", data)
        end = len(data)
        if cut is not None:
            tail = cut.group(0)
            expected = 0 if tail[0] == 0x1B else 2 if tail[0] < 0xE0 else 3 if tail[0] < 0xF0 else 4
            end = cut.start() if not expected or len(tail) < expected else len(data)
        self._rest = data[end:]
        return data[:end]

    def end(self, timeout_s: float = 30.0) -> list[str]:
        """Read to the end; the lines of the terminal."""
        self.read(timeout_s=timeout_s)
        os.close(self._ours)
        self.process.wait(timeout_s)
        return self.screen.lines
