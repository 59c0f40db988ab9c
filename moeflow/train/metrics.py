"""The run's own metric files: metrics.jsonl, metrics.csv and summary.json.

    metrics.jsonl             one JSON object a line, each with "step"; evaluation rows carry eval/... keys
    metrics.csv               the same rows; a column for every key seen so far
    metrics.discarded.jsonl   rows of steps that a resumed run does again, and lines that a crash tore
    summary.json              the final figures

A run of 200 steps and one of 100 + 100 leave the same rows, apart from the keys in `TIMING`: a resume cuts off the
rows after its checkpoint's step before it writes new ones.  So the rows of step N, its evaluation among them, have to
be logged before the checkpoint of step N is saved.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from moeflow.errors import MoeflowError
from moeflow.logging import get_logger
from moeflow.train.files import fsync_folder, json_bytes, plain, write_atomic
from moeflow.train.shelf import resume_command

logger = get_logger(__name__)
JSONL, CSV, SUMMARY = "metrics.jsonl", "metrics.csv", "summary.json"

#: Keys that differ from run to run: wall-clock time, and what is derived from it.
TIMING = frozenset({"time_s", "step_s", "eval_s", "samples_per_s", "tokens_per_s", "eta_s", "time"})


class MetricsLog:
    """Appends rows to the files of one run folder; silent on all ranks but 0.

    Args:
        run_dir: an existing folder.
        resume_step: step of the checkpoint that the run goes on from; rows after it are moved to the discarded ones.
            None or 0 for a new run.
        rank: of this process.

    Raises:
        MoeflowError: the files cannot be read or written.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None, *, rank: int = 0):
        self.run_dir = Path(run_dir)
        self._active = rank == 0
        self._jsonl: IO[bytes] | None = None
        self._csv: IO[bytes] | None = None
        self._columns: list[str] = []
        if self._active:
            with naming(self.run_dir / JSONL):
                cut_rows(self.run_dir / JSONL, resume_step or 0)
                self._jsonl = open(self.run_dir / JSONL, "ab", buffering=0)  # noqa: SIM115 (open for the whole run)
                self._rewrite_csv()

    def log(self, row: dict[str, Any]) -> None:
        """Append one row, out of this process's hands when the call returns.

        Args:
            row: "step" and any number of scalars (of Python, torch or numpy).

        Raises:
            MoeflowError: the disk is full or gone.
        """
        assert "step" in row
        if not self._active:
            return
        assert self._jsonl is not None and self._csv is not None, "log after close"
        content = plain(row)
        with naming(self.run_dir / JSONL):
            # One unbuffered write a row: a kill loses no row that was logged.
            self._jsonl.write((json.dumps(content, allow_nan=False) + "\n").encode())
            if set(content) <= set(self._columns):
                self._csv.write(_csv_lines(self._columns, [content]))
            else:
                self._rewrite_csv()

    def write_summary(self, values: dict[str, Any]) -> None:
        """Replace summary.json in one step."""
        if self._active:
            with naming(self.run_dir / SUMMARY):
                write_atomic(self.run_dir / SUMMARY, json_bytes(values))

    def close(self) -> None:
        """Sync both files to disk and close them; may be called again."""
        for stream in (self._jsonl, self._csv):
            if stream is not None:
                with naming(self.run_dir / JSONL):
                    os.fsync(stream.fileno())
                    stream.close()
        self._jsonl = self._csv = None

    def _rewrite_csv(self) -> None:
        """Write metrics.csv anew from metrics.jsonl, with a column for every key in it."""
        source, target = self.run_dir / JSONL, self.run_dir / CSV
        self._columns = list(dict.fromkeys(key for row in read_rows(source) for key in row))
        if self._csv is not None:
            self._csv.close()
        aside = target.with_name(f"{CSV}.tmp")
        with open(aside, "wb") as stream:
            if self._columns:
                stream.write(_csv_lines(self._columns, [dict(zip(self._columns, self._columns, strict=True))]))
            for row in read_rows(source):
                stream.write(_csv_lines(self._columns, [row]))
        os.replace(aside, target)
        self._csv = open(target, "ab", buffering=0)  # noqa: SIM115 (open for the whole run)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl in order, leaving out a line that a crash tore."""
    with open(path, "rb") as stream:
        for line in stream:
            if (row := _parse(line)) is not None:
                yield row


def without_timing(row: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a row that are equal in every repetition of a run."""
    return {key: value for key, value in row.items() if key not in TIMING}


def cut_rows(path: Path, step: int) -> None:
    """Keep the rows up to `step` in a file such as metrics.jsonl; move all else to NAME.discarded.jsonl beside it."""
    if not path.is_file():
        return
    discarded = path.with_suffix(f".discarded{path.suffix}")
    kept: list[bytes] = []
    moved: list[bytes] = []
    torn = 0
    for line in path.read_bytes().splitlines(keepends=True):
        row = _parse(line)
        torn += row is None
        (kept if row is not None and row["step"] <= step else moved).append(line)
    if not moved:
        return
    if torn:
        logger.warning("%s: %d torn line(s) moved to %s", path, torn, discarded.name)
    # First kept elsewhere, then cut: a crash between the two leaves a row twice, never nowhere.
    with open(discarded, "ab") as stream:
        stream.writelines(line.rstrip(b"\n") + b"\n" for line in moved)
        stream.flush()
        os.fsync(stream.fileno())
    write_atomic(path, b"".join(kept))
    fsync_folder(path.parent)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line, or None when it is not a whole one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if whole else None


def _csv_lines(columns: list[str], rows: Iterable[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([_cell(row.get(column)) for column in columns])
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


class naming:
    """Turns an OSError inside the block into a short error that names the file."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, exc: BaseException | None, trace: Any) -> None:
        if isinstance(exc, OSError):
            raise MoeflowError(
                f"{exc.filename or self.path} cannot be written: {exc.strerror or exc}",
                f"free or mend the disk, then go on: {resume_command(self.path.parent)}",
            ) from exc
