"""Where a run's numbers go: files, trackers and the terminal.  Silent on all ranks but 0."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from moeflow.parallel.topology import Topology
from moeflow.schema import RunConfig
from moeflow.train.metrics import MetricsLog
from moeflow.train.progress import Progress
from moeflow.train.trackers import TrackedRun, Trackers


class Reporter:
    """Reports one run.

    Args:
        config: of the run.
        run_dir: of the run.
        topology: of this rank.
        resume_step: of the checkpoint that the run goes on from, if any.
        source: of the data, "real" or "synthetic".
        unit: what throughput is counted in, "samples" or "tokens".
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: str | Path,
        topology: Topology,
        resume_step: int | None = None,
        source: str = "real",
        unit: str = "samples",
    ):
        self.config, self.unit = config, unit
        self._dp = topology["dp"].size
        rank = topology.rank
        name = config.run.name or config.run.recipe or config.model.name
        tracked = TrackedRun(
            Path(run_dir),
            f"{name} ({source} data)" if source == "synthetic" else name,
            dataclasses.asdict(config),
            {"data": source, "recipe": config.run.recipe or ""},
            config.tracker.project,
            config.tracker.mode,
            resume_step,
        )
        self.metrics = MetricsLog(run_dir, resume_step, rank=rank)
        self.trackers = Trackers(config.tracker.names, tracked, rank=rank)
        self.terminal = Progress(Path(run_dir), active=rank == 0)
        self._summary: dict[str, Any] | None = None
        self._mark = time.perf_counter()
        self._units = 0

    def banner(self, lines: list[tuple[str, str]]) -> None:
        """Print the first lines."""
        self.terminal.banner(lines)

    def start(self, step: int, last: int) -> None:
        """Training begins after `step` and is to go on to `last`."""
        self.terminal.start(step, last)
        self._mark, self._units = time.perf_counter(), 0

    def progress(self, step: int, units: int) -> None:
        """One step is done; `units` samples or tokens of this rank went into it."""
        self._units += units * self._dp
        self.terminal.advance(step)

    def row(self, step: int, row: dict[str, float]) -> None:
        """Log a training row; throughput since the last one is added."""
        now = time.perf_counter()
        seconds = max(now - self._mark, 1e-9)
        self._log({"step": step, **row, f"{self.unit}_per_s": self._units / seconds})
        self.terminal.row(step, {**row, f"{self.unit}_per_s": self._units / seconds})
        self._mark, self._units = now, 0

    def evaluation(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Log an evaluation."""
        self._log({"step": step, **metrics, "eval_s": seconds})
        self.terminal.evaluation(step, metrics)
        # The time of an evaluation is not the training's.
        self._mark += seconds

    def _log(self, row: dict[str, Any]) -> None:
        self.metrics.log(row)
        self.trackers.log(row)

    def end(self, summary: dict[str, Any]) -> None:
        """Write the summary and say what to do next."""
        self._summary = summary
        self.metrics.write_summary(summary)
        self.terminal.end(summary)

    def close(self, exit_code: int = 1) -> None:
        """Close everything; after `end` the exit code is that of the summary."""
        if self._summary is not None:
            exit_code = self._summary.get("exit_code", 0)
        self.terminal.close()
        self.metrics.close()
        self.trackers.end_training(self._summary, exit_code=exit_code)
