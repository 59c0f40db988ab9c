"""What Ctrl-C and SIGTERM do before the training listens to them itself (moeflow.train.signals).

Importing torch takes seconds, and an exception that is raised out of the middle of it surfaces as nearly anything; so a
command that has nothing to save yet ends on the spot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from moeflow.errors import Stopped


@contextlib.contextmanager
def ending_at_once(last_words: Callable[[int], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the process inside the block, with exit code 128 + signal.

    Args:
        last_words: called first, with the signal's number.
    """

    def end(number: int, frame: FrameType | None) -> None:
        last_words(number)
        os._exit(128 + number)

    with _handled(end, signal.SIGINT, signal.SIGTERM):
        yield


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise `Stopped` inside the block, as Ctrl-C raises KeyboardInterrupt."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    with _handled(stop, signal.SIGTERM):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Set handlers for the time of the block; a signal that whoever started us wants ignored stays ignored."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in numbers if number not in ignored}
    try:
        yield
    finally:
        for number, previous in before.items():
            # None stands for a handler that was not set from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
