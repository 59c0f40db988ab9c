"""The folder that holds a run's checkpoints: names, the `latest` pointer, renames, removal.  One process, no torch.

    FOLDER/latest                     name of the checkpoint to go on from
    FOLDER/.lock                      held by the run that writes here
    FOLDER/step_00000100/             complete: it appears by one rename
    FOLDER/step_00000200.tmp/         being written; rubbish after a crash
    FOLDER/step_00000100.old/         being replaced by a new save of the same step
    FOLDER/step_00000100.trash/       being deleted

Every change is one rename or one replaced file, ordered so that a crash between any two leaves a complete checkpoint
that `latest()` finds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import socket
from pathlib import Path
from typing import Any

from moeflow.errors import CheckpointError
from moeflow.logging import get_logger
from moeflow.train import manifest
from moeflow.train.files import fsync_folder, write_atomic

logger = get_logger(__name__)
LATEST = "latest"
META = "meta.json"
_COMPLETE = re.compile(r"step_(\d{8,})(\.old)?")
_PARTS = re.compile(r"step_(\d{8,})\.(tmp|old|trash)")


class Shelf:
    """Checkpoint folders of one run, as one process sees and changes them."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._lock: int | None = None

    # --- reading -----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, rising.

        One that has lost its manifest is among them: it was complete when it got its name, so it is damaged now, and
        has to be told of and not passed over.
        """
        if not self.folder.is_dir():
            return []
        names = [path.name for path in self.folder.iterdir() if path.is_dir()]
        return sorted({int(match[1]) for match in map(_COMPLETE.fullmatch, names) if match})

    def latest(self) -> int | None:
        """Return the step to go on from, or None when nothing was saved.

        A pointer that is lost, or names a checkpoint that somebody deleted, gives the newest complete one.
        """
        steps = self.steps()
        pointer = self.folder / LATEST
        match = _COMPLETE.fullmatch(pointer.read_text(errors="replace").strip()) if pointer.is_file() else None
        if match and int(match[1]) in steps:
            return int(match[1])
        return steps[-1] if steps else None

    def path(self, step: int) -> Path:
        """Return the folder of a complete checkpoint.

        Raises:
            CheckpointError: there is none of that step.
        """
        folder, replaced = self._named(step), self._named(step, ".old")
        if folder.is_dir():
            return folder
        if replaced.is_dir():  # a crash between the two renames of a replacing save
            return replaced
        held = self.steps()
        mend = f"choose one of the steps {held}" if held else "check the path of the run folder, or train first"
        raise CheckpointError(f"there is no checkpoint of step {step} in {self.folder}", mend)

    def choose(self, step: int | None) -> int:
        """Return `step` where there is a checkpoint of it, the latest one where it is None.

        Raises:
            CheckpointError: there is none.
        """
        found = self.latest() if step is None else step
        if found is None:
            raise CheckpointError(
                f"there is no checkpoint in {self.folder} yet",
                "wait for the run's first one (checkpoint.every), or choose another run (moeflow ls)",
            )
        self.path(found)
        return found

    def meta(self, step: int) -> dict[str, Any]:
        """Return what `meta.json` of a checkpoint holds.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        path = self.path(step) / META
        if not path.is_file():
            raise CheckpointError(f"{path} is missing", self.way_out(step))
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as exc:
            raise CheckpointError(f"{path} cannot be read: {exc}", self.way_out(step)) from exc
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} is damaged: it holds no table", self.way_out(step))
        tables = (content.get("metrics") or {}, content.get("layout") or {})
        if type(content.get("step")) is not int or not all(isinstance(table, dict) for table in tables):
            raise CheckpointError(f"{path} is damaged: step, metrics or layout are missing", self.way_out(step))
        return content

    def ranked(self, metric: str, direction: str) -> list[int]:
        """Return the steps that have a finite `meta["metrics"][metric]`, best first; of equal ones the later.

        Checkpoints whose `meta.json` is damaged are left out, with a warning.
        """
        assert direction in ("max", "min")
        sign = -1.0 if direction == "max" else 1.0
        scores = []
        for step in self.steps():
            try:
                value = (self.meta(step).get("metrics") or {}).get(metric)
            except CheckpointError as error:
                # A run does not end because an old checkpoint of its was damaged.
                logger.warning("%s; it is not among the best", error.what)
                continue
            try:
                number = float(value)  # type: ignore[arg-type]  # anything may stand in a damaged file
            except (TypeError, ValueError, OverflowError):
                continue
            if math.isfinite(number):
                scores.append((sign * number, -step))
        return [-step for _, step in sorted(scores)]

    def faults(self, step: int, part: int = 0, parts: int = 1) -> None:
        """Compare the files of a checkpoint with its manifest (the `part`-th of `parts` equal shares of them).

        Raises:
            CheckpointError: names each damaged file.
        """
        folder = self.path(step)
        files = manifest.read(folder)["files"]
        if found := manifest.faults(folder, manifest.share(files, part, parts)):
            raise CheckpointError(f"checkpoint {folder} is damaged: {'; '.join(found)}")

    def way_out(self, step: int) -> str:
        """Return the advice for a checkpoint that is damaged: the newest earlier one that is good."""
        for earlier in reversed([held for held in self.steps() if held < step]):
            try:
                self.faults(earlier)
            except CheckpointError:
                continue
            return f"resume from step {earlier}: {resume_command(self.folder.parent, earlier)}"
        return f"no earlier checkpoint in {self.folder} is good; start the run anew"

    # --- writing -----------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Hold the folder's lock until `release` or the end of the process, however it ends.

        Raises:
            CheckpointError: another live run writes here.
        """
        if self._lock is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / ".lock"
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # A record lock, not flock: it works over NFS, and data workers forked from a killed rank do not inherit it.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            owner = os.read(handle, 200).decode(errors="replace").strip()
            os.close(handle)
            if exc.errno in (errno.ENOLCK, errno.ENOTSUP):
                logger.warning("%s: no locks on this file system; do not start two runs in one folder", self.folder)
                return
            if exc.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise CheckpointError(
                f"{self.folder} is in use: another run writes its checkpoints there ({owner or 'unknown process'})",
                "wait for it to end, or give this run a folder of its own (run.dir)",
            ) from None
        self._lock = handle
        os.truncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def begin(self, step: int) -> Path:
        """Take the folder, clear what a crash left, and return a new empty folder to write `step` into.

        Raises:
            CheckpointError: another live run writes here.
            OSError: the disk is full, read-only or gone.
        """
        self.claim()
        self._sweep()
        aside = self.aside(step)
        aside.mkdir()
        return aside

    def aside(self, step: int) -> Path:
        """Return the folder that `step` is written into before it is complete."""
        return self._named(step, ".tmp")

    def publish(self, step: int) -> None:
        """Turn the complete aside folder into the checkpoint of `step`, then into the latest.

        Raises:
            OSError: the disk is full, read-only or gone.
        """
        aside, folder, replaced = self.aside(step), self._named(step), self._named(step, ".old")
        for inner in {path.parent for path in aside.rglob("*")} | {aside}:
            fsync_folder(inner)
        if folder.is_dir():
            os.rename(folder, replaced)
        os.rename(aside, folder)
        fsync_folder(self.folder)
        self.point(step)
        self._discard(replaced)

    def point(self, step: int) -> None:
        """Make `step` the latest."""
        self.path(step)
        write_atomic(self.folder / LATEST, f"{self._named(step).name}\n".encode())

    def give_up(self, step: int) -> None:
        """Remove what was written of a save that failed (it may be what fills the disk)."""
        self._discard(self.aside(step))

    def prune(self, keep_last: int, keep_best: int, metric: str, direction: str) -> list[int]:
        """Delete what no rule keeps; see `CheckpointStore.prune`."""
        assert keep_last >= 1
        assert keep_best >= 0
        newest = self.latest()
        if newest is None:
            return []
        self.claim()
        line = [step for step in self.steps() if step <= newest]
        best = [step for step in self.ranked(metric, direction) if step <= newest] if keep_best else []
        kept = {newest, *line[-keep_last:], *best[:keep_best]}
        removed = [step for step in self.steps() if step not in kept]
        for step in removed:
            self._discard(self.path(step))
        return removed

    def release(self) -> None:
        """Let another run have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _named(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step_{step:08d}{suffix}"

    def _sweep(self) -> None:
        """Clear the traces of a crash.  Under the lock, so nothing here belongs to a live run."""
        for path in sorted(self.folder.iterdir()):
            match = _PARTS.fullmatch(path.name)
            if match is None:
                continue
            whole = self._named(int(match[1]))
            if match[2] == "old" and not whole.is_dir():
                os.rename(path, whole)
            else:
                self._discard(path)

    def _discard(self, path: Path) -> None:
        """Delete a folder so that a crash in the middle never leaves a half that looks whole."""
        trash = path if path.suffix in (".tmp", ".trash") else path.with_suffix(".trash")
        try:
            if path != trash and path.is_dir():
                os.rename(path, trash)
            if trash.is_dir():
                shutil.rmtree(trash)
        except OSError as exc:
            # Space that could not be freed is no reason to end a run; the next save tries again.
            logger.warning("could not delete %s: %s", trash, exc)


def resume_command(run_dir: str | Path, step: int | None = None) -> str:
    """Return the command that goes on with a run, from its latest checkpoint or from an earlier one."""
    return f"moeflow resume {shlex.quote(str(run_dir))}" + ("" if step is None else f" --step {step}")
