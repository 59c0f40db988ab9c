"""Ctrl-C and SIGTERM: the first asks the run to save and stop, a second ends it at once.

Signals are counted in a thread of their own that reads Python's wake-up pipe.  A handler would run in the main thread
only, and not before it comes back from C: a rank that waits in a collective for a dead peer could never be stopped.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from moeflow.errors import Stopped
from moeflow.logging import get_logger, rank
from moeflow.parallel.environment import detect

logger = get_logger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)

#: Seconds after the first signal in which further ones are the same request.  `timeout` signals the process and then
#: its group; torchrun and mpirun forward what the terminal has sent to the ranks as well.
GRACE_S, GRACE_LAUNCHED_S = 0.3, 3.0
_END = 0  # no signal has this number

_active: StopSignal | None = None
_fork_hook_set = False


class StopSignal:
    """Listens for SIGINT and SIGTERM inside a `with` block of the main thread; previous handlers come back after it.

    Args:
        resume_command: what goes on with the run later, for the message.
        begun: whether there is something to save from the start.  Otherwise, until `begin` is called, the first signal
            raises `Stopped` out of whatever the main thread does: a download of minutes, a file system that hangs.
        grace_s: see `GRACE_S`; None takes the one that fits how this process was started.

    Attributes:
        signum: number of the first signal, or None.
    """

    def __init__(self, resume_command: str | None = None, *, begun: bool = True, grace_s: float | None = None):
        self.resume_command = resume_command
        self._begun = begun
        self.signum: int | None = None
        self._stopped = False
        self._grace_s = grace_s if grace_s is not None else GRACE_S if detect() is None else GRACE_LAUNCHED_S
        self._asked_at = 0.0
        self._previous: dict[int, Any] = {}
        self._previous_pipe = -1
        self._thread: threading.Thread | None = None
        self._read, self._write = -1, -1

    def stop_requested(self) -> bool:
        """Whether a signal came.  Ranks may learn of it at different steps; the trainer makes them agree."""
        return self.signum is not None

    def begin(self) -> None:
        """Training begins: from now on the first signal only asks."""
        self._begun = True

    def __enter__(self) -> StopSignal:
        global _active
        if threading.current_thread() is not threading.main_thread():
            logger.warning("training outside of the main thread: Ctrl-C and SIGTERM will not save first")
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._thread = threading.Thread(target=self._listen, name="stop-signal", daemon=True)
        self._thread.start()
        _active = self
        _forget_in_children()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        if self._thread is None:
            return
        _active = None
        self._restore()
        os.write(self._write, bytes([_END]))
        self._thread.join()
        self._thread = None
        os.close(self._read)
        os.close(self._write)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Without a handler a signal would take its default course.

        One that comes while the first is on its way out is left to the thread.
        """
        if not self._begun and not self._stopped:
            self._stopped = True
            raise Stopped(number)

    def _restore(self) -> None:
        signal.set_wakeup_fd(self._previous_pipe)
        for number, handler in self._previous.items():
            # None stands for a handler that was not set from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _listen(self) -> None:
        while data := os.read(self._read, 64):
            for number in data:
                if number == _END:
                    return
                if number in SIGNALS:
                    self._count(number)

    def _count(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.signum is None:
            self.signum = number
            self._asked_at = time.monotonic()
            if rank() == 0 and self._begun and not self._stopped:
                later = f"; go on later with: {self.resume_command}" if self.resume_command else ""
                logger.warning("%s: saving after this step, then stopping (once more: at once)%s", name, later)
            elif rank() == 0:
                logger.warning("%s before the first step: stopping; there is nothing to save yet", name)
        elif time.monotonic() - self._asked_at > self._grace_s:
            if rank() == 0:
                # Straight to the terminal: the main thread may hold the locks of the logger and of the progress line.
                show_cursor = "\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else ""
                os.write(2, f"{show_cursor}{name} again: ending at once; the last checkpoint stays\n".encode())
            os._exit(128 + number)


def _forget_in_children() -> None:
    """Cut forked data workers off the pipe: what they are sent is no signal to this process."""
    global _fork_hook_set
    if not _fork_hook_set:
        _fork_hook_set = True
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    global _active
    if _active is not None:
        _active._restore()
        _active._thread = None
        _active = None
