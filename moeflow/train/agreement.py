"""Steps that all ranks do together: when one fails, every one raises, and none is left waiting."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from moeflow.errors import CheckpointError, MoeflowError
from moeflow.parallel.collectives import gather_objects
from moeflow.parallel.topology import Group

T = TypeVar("T")


class Agreement:
    """Runs calls on all ranks of a group and makes their outcome common.

    Args:
        group: with a CPU backend.
        folder: what the calls work on, named in messages.
    """

    def __init__(self, group: Group, folder: Path):
        self.group = group
        self.folder = folder

    def all(self, call: Callable[..., T], *args: Any) -> list[T]:
        """Run `call` on every rank and return all results in rank order.

        Raises:
            CheckpointError: on every rank, where a rank met a MoeflowError or OSError.  Any other exception is a
                defect: it is raised as it is where it occurred.
        """
        result, failure = None, None
        try:
            result = call(*args)
        except Exception as exc:  # whatever it is, the others must not wait for a rank that is gone
            failure = exc
        replies = gather_objects((result, None if failure is None else self._told(failure)), self.group)
        told = [fault for _, fault in replies if fault is not None]
        if not told:
            return [value for value, _ in replies]
        if failure is not None and not isinstance(failure, (MoeflowError, OSError)):
            raise failure
        mend = next((mend for _, mend in told if mend), None)
        raise CheckpointError("; ".join(what for what, _ in told), mend) from failure

    def first(self, call: Callable[..., T], *args: Any) -> T:
        """Run `call` on rank 0 alone and return its result on every rank; raises as `all` does."""
        return self.all(lambda: call(*args) if self.group.rank == 0 else None)[0]  # type: ignore[return-value]

    def _told(self, failure: Exception) -> tuple[str, str | None]:
        where = f"rank {self.group.rank}: " if self.group.size > 1 else ""
        if isinstance(failure, OSError):
            failure = disk_error(f"checkpoint in {self.folder}", failure)
        if isinstance(failure, MoeflowError):
            return where + failure.what, failure.mend
        return f"{where}{type(failure).__name__}: {failure}", None


def disk_error(what: str, cause: OSError) -> CheckpointError:
    """Return a CheckpointError that names the file and the cause, and says what mends it."""
    mend = {
        errno.ENOSPC: "free space on that disk, or keep fewer checkpoints (checkpoint.keep_last, checkpoint.keep_best)",
        errno.EDQUOT: "free space under the quota, or keep fewer checkpoints (checkpoint.keep_last)",
        errno.EROFS: "make the file system writable, or use another run folder (run.dir)",
        errno.EACCES: "make the folder writable for this user, or use another run folder (run.dir)",
        errno.EPERM: "make the folder writable for this user, or use another run folder (run.dir)",
    }.get(cause.errno or 0)
    where = f"{cause.filename}: " if cause.filename else ""
    return CheckpointError(f"{what}: {where}{cause.strerror or cause}", mend)
