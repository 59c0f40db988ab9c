"""Files that are either the old ones or the new ones after a crash, never halves."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any


def fsync_folder(path: Path) -> None:
    """Make renames and new names inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as exc:
        # Some network file systems have no fsync of folders; their renames are synchronous.
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on disk."""
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` in one step: readers and a crash see the old content or the new one.

    Raises:
        OSError: the folder is full, read-only or gone; `path` is unchanged then.
    """
    aside = path.with_name(f"{path.name}.tmp")
    write_synced(aside, data)
    os.replace(aside, path)
    fsync_folder(path.parent)


def plain(value: Any) -> Any:
    """Return `value` as JSON knows it: scalars of torch and numpy become numbers, tuples lists, paths text.

    JSON has no NaN or infinity; they become the texts "NaN", "Infinity" and "-Infinity", which `float()` reads back.
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, (bool, int, float, str)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def json_bytes(value: Any, indent: int | None = 2) -> bytes:
    """Return strict JSON of `value` (see `plain`), with a newline at its end."""
    return (json.dumps(plain(value), indent=indent, allow_nan=False) + "\n").encode()
