"""What each expert of each MoE layer got, over the time of a run: experts.jsonl in the run folder.

    {"step": 20, "layers": {"blocks.1.moe": {"tokens": [31, 0, ...], "dropped": 2, "entropy": 1.93}, ...}}

`tokens` are the choices of each expert as the gate made them, before capacity, over all ranks, in the last micro-batch
of the step; `dropped` those of them that found no room; `entropy` is that of the gate's probabilities in nats, or null.

A row is written on steps that are logged anyway.  So that the file of a long run stays small, rows grow rarer with the
steps: the first `full_rows` logged steps have one each, the next as many every second one, the next twice as many every
fourth, and so on: half as many rows as the first for each doubling.  Which steps have a row depends on their number
alone, so a run in parts leaves the same file as one in one go.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from moeflow.train.files import plain
from moeflow.train.metrics import cut_rows, naming

EXPERTS = "experts.jsonl"

# Counts in the rows without gaps: a million take about 5 MB.
_COUNTS = 2**20
_ROWS = (64, 1024)


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """One MoE layer in one step, over all ranks.

    Attributes:
        tokens: choices of each expert before capacity.
        dropped: choices for which there was no room.
        entropy: of the gate's probabilities, nats; None for gates without probabilities.
    """

    tokens: list[int]
    dropped: int
    entropy: float | None = None


class ExpertLog:
    """Appends rows to experts.jsonl; silent on all ranks but 0.

    Args:
        run_dir: an existing folder.
        log_every: steps between logged ones.
        resume_step: step of the checkpoint that the run goes on from; rows after it are moved away.
        rank: of this process.

    Raises:
        MoeflowError: the file cannot be read or written.
    """

    def __init__(self, run_dir: str | Path, log_every: int, resume_step: int | None = None, *, rank: int = 0):
        self.path = Path(run_dir) / EXPERTS
        self.log_every = log_every
        self._active = rank == 0
        self._stream: IO[bytes] | None = None
        if self._active:
            with naming(self.path):
                cut_rows(self.path, resume_step or 0)

    def log(self, step: int, layers: Mapping[str, LayerLoad]) -> None:
        """Append the row of a logged step, where this one is to have any; out of this process when it returns.

        Raises:
            MoeflowError: the disk is full or gone.
        """
        if not self._active or not layers:
            return
        counts = sum(len(layer.tokens) for layer in layers.values())
        if not is_kept(step // self.log_every, full_rows(counts)):
            return
        row = {
            "step": step,
            "layers": {
                name: {"tokens": layer.tokens, "dropped": layer.dropped, "entropy": plain(layer.entropy)}
                for name, layer in layers.items()
            },
        }
        text = json.dumps(row, allow_nan=False, separators=(",", ":"))
        with naming(self.path):
            if self._stream is None:
                # Not before there is something to write: models without MoE layers have no such file.
                self._stream = open(self.path, "ab", buffering=0)  # noqa: SIM115 (open for the whole run)
            self._stream.write(f"{text}\n".encode())

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None


def full_rows(counts: int) -> int:
    """Rows of `counts` numbers that are written without gaps: a power of two."""
    least, most = _ROWS
    rows = most
    while rows > least and rows * counts > _COUNTS:
        rows //= 2
    return rows


def is_kept(index: int, full: int) -> bool:
    """Whether the logged step of this index (0, 1, 2, ...) has a row.

    is_kept(i, 4) holds for 0 1 2 3, 4 6, 8 12, 16 24, 32 48, ...
    """
    stride = 1
    while index >= full * stride:
        stride *= 2
    return index % stride == 0
