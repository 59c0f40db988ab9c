"""Where a run's numbers go: files, trackers and the terminal.  Silent on all ranks but 0."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import time
from pathlib import Path
from typing import Any

from moeflow.logging import ROOT, get_logger
from moeflow.logging import rank as rank_of_process
from moeflow.parallel.topology import Topology
from moeflow.schema import RunConfig
from moeflow.train.expert_log import ExpertLog
from moeflow.train.metrics import JSONL, MetricsLog, read_rows
from moeflow.train.moe_metrics import Loads
from moeflow.train.progress import Progress, format_metrics
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
        self.experts = ExpertLog(run_dir, config.trainer.log_every, resume_step, rank=rank)
        self.trackers = Trackers(config.tracker.names, tracked, rank=rank)
        self.terminal = Progress(
            config.trainer.max_steps, start_step=resume_step or 0, verbosity=verbosity(), rank=rank
        )
        self.run_dir = Path(run_dir)
        if resume_step and rank == 0:
            self.terminal.remember(read_rows(self.run_dir / JSONL))
        self._summary: dict[str, Any] | None = None
        self._mark = time.perf_counter()
        self._units = 0

    def banner(self, lines: list[tuple[str, str]]) -> None:
        """Print the first lines."""
        self.terminal.banner(lines)

    def start(self) -> None:
        """Training begins."""
        self._mark, self._units = time.perf_counter(), 0

    def progress(self, step: int, units: int, row: dict[str, float] | None = None, loads: Loads | None = None) -> None:
        """One step is done; `units` samples or tokens of this rank went into it.

        Args:
            step: optimizer steps done.
            units: of this rank.
            row: metrics of the step, when it is a logged one; throughput since the last such row is added.
            loads: what the experts got in that step, by layer; with `row`.
        """
        self._units += units * self._dp
        if row is not None:
            now = time.perf_counter()
            row = {"step": step, **row, f"{self.unit}_per_s": self._units / max(now - self._mark, 1e-9)}
            self._mark, self._units = now, 0
            self._log(row)
        if loads:
            self.experts.log(step, loads)
        self.terminal.update(step, row, {name: load.tokens for name, load in loads.items()} if loads else None)

    def aside(self, lines: list[str], seconds: float) -> None:
        """Print lines that stay, such as the table of a profile; the time they took is not the training's."""
        for line in lines:
            self.terminal.event(line)
        self._mark += seconds

    def evaluation(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Log an evaluation."""
        self._log({"step": step, **metrics, "eval_s": seconds})
        self.terminal.evaluation(step, metrics)
        # The time of an evaluation is not the training's.
        self._mark += seconds

    def _log(self, row: dict[str, Any]) -> None:
        self.metrics.log(row)
        self.trackers.log(row)

    def end(self, summary: dict[str, Any], sample: str | None = None) -> None:
        """Write the summary and say what to do next.

        Args:
            summary: final figures.
            sample: what the trained model wrote, where it writes.
        """
        self._summary = summary
        self.metrics.write_summary(summary)
        folder = _shown(self.run_dir)
        lines = [("sample", sample)] if sample else []
        if summary["status"] == "finished":
            figures = {key: value for key, value in summary.items() if key.startswith("eval/")}
            lines += [("result", format_metrics(figures, all_keys=True)), ("next", f"moeflow eval {folder}")]
        else:
            lines += [("stopped", f"at step {summary['step']}, saved"), ("next", f"moeflow resume {folder}")]
        self.terminal.finish(lines)

    def close(self, exit_code: int = 1) -> None:
        """Close everything; after `end` the exit code is that of the summary."""
        if self._summary is not None:
            exit_code = self._summary.get("exit_code", 0)
        self.terminal.close()
        self.metrics.close()
        self.experts.close()
        self.trackers.end_training(self._summary, exit_code=exit_code)


def verbosity() -> int:
    """-1, 0 or 1, as the command line's -q and -v have set moeflow's log level."""
    level = get_logger(ROOT).getEffectiveLevel()
    return -1 if level > logging.INFO and rank_of_process() == 0 else 1 if level < logging.INFO else 0


def _shown(path: Path) -> str:
    """The path as the user would type it from here, quoted for the shell where it has to be."""
    inside = path.is_relative_to(Path.cwd())
    return shlex.quote(str(path.relative_to(Path.cwd()) if inside else path))
