"""Reading a file that somebody named."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file, or of one that a link leads to.

    A pipe without a writer would be waited for, and a device such as /dev/zero read, forever; neither can be read a
    second time by another rank or by a resume.

    Raises:
        OSError: it cannot be read, or is no regular file; `strerror` says which.
    """
    with open(path, "rb", opener=_without_waiting) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(0, "it is a pipe or a device, not a file")
        return stream.read()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
