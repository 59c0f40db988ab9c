"""`moeflow train --multirun`: the jobs of a sweep one after another, each a process of its own, then a ranking.

A job that fails does not stop the others.  Jobs whose configuration is wrong are told before the first one starts, and
count as failed.  Ctrl-C lets the running job save and end; the table of what was done is still printed and written.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException

from moeflow import logging
from moeflow.cli.interrupts import terminated_as_interrupted
from moeflow.cli.provenance import command_line
from moeflow.cli.runs import read_summary, shown
from moeflow.config.composition import compose_run
from moeflow.config.options import check_config_dirs, group_names, options
from moeflow.config.overrides import parse_words
from moeflow.config.problems import Problem, raise_any
from moeflow.errors import ConfigError, MoeflowError, stopped_code
from moeflow.train.rundir import RunDir

logger = logging.get_logger(__name__)

#: Figures a sweep is ranked by, the first that any job has -> whether more is better.
RANKED_BY = {"eval/accuracy": True, "eval/perplexity": False, "eval/loss": False, "loss": False}
#: More jobs than this are taken for a slip of the hand.
MOST_JOBS = 1000
#: Seconds that an interrupted job has to save its checkpoint before it is killed.
GRACE_S = 120.0


@dataclasses.dataclass(slots=True)
class Job:
    """One job of a sweep.

    Attributes:
        number: its place in the sweep, from 0.
        words: its overrides.
        varied: the words that differ between the jobs.
        state: waiting, invalid, finished, failed or interrupted.
        exit_code: of its process, or of its error where its configuration is invalid.
        error: why it did not start or run.
        run_dir: its run folder.
        seconds: how long it ran.
        metrics: its final figures, from summary.json.
    """

    number: int
    words: list[str]
    varied: list[str]
    state: str = "waiting"
    exit_code: int | None = None
    error: str | None = None
    run_dir: Path | None = None
    seconds: float | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(self.varied) or "(no sweep)"


Runner = Callable[[Job, Sequence[str]], int]


def sweep(words: Sequence[str], config_dirs: Sequence[str], verbosity: int = 0, runner: Runner | None = None) -> int:
    """Run a sweep.

    Args:
        words: overrides, some of them with several values.
        config_dirs: the user's folders.
        verbosity: passed on to the jobs.
        runner: runs one job, given the words after `moeflow`, and returns its exit code; a process where None.

    Returns:
        0 when every job finished, 1 when some failed, 128 + signal when interrupted.

    Raises:
        ConfigError: the sweep cannot be read, or none of its jobs is valid; nothing was written then.
    """
    folders = [Path(folder).absolute() for folder in config_dirs]
    check_config_dirs(folders)
    jobs = expand(words, folders)
    root = _check(jobs, folders)
    folder = _make_folder(root)
    logger.info("%d jobs in %s", len(jobs), shown(folder))
    flags = [word for each in folders for word in ("--config-dir", str(each))] + {-1: ["-q"], 1: ["-v"]}.get(
        verbosity, []
    )
    with terminated_as_interrupted():
        stop = _run_all(jobs, folder, flags, runner or run_process)
    ranking = rank(jobs)
    _write(folder, jobs, ranking)
    print_table(jobs, ranking, folder)
    if stop is not None:
        return stopped_code(stop)
    return 0 if all(job.state == "finished" for job in jobs) else 1


def expand(words: Sequence[str], config_dirs: Sequence[Path] = ()) -> list[Job]:
    """Return the jobs: every combination of the values, the last override varying fastest.

    Raises:
        ConfigError: an override cannot be read, or names no value.
    """
    problems: list[Problem] = []
    axes: list[list[str]] = []
    swept: list[bool] = []
    for override in parse_words(words, problems, config_dirs):
        values = _values(override, config_dirs, problems)
        axes.append(values)
        swept.append(override.is_sweep_override())
    raise_any(problems)
    if not words:
        raise ConfigError("nothing to sweep was named.", "moeflow train --multirun +recipe=NAME gate=naive,switch")
    count = math.prod(map(len, axes))
    if count > MOST_JOBS:
        raise ConfigError(
            f"the sweep would be {count} jobs or more; at most {MOST_JOBS} are taken.", "name fewer values"
        )
    combinations = itertools.product(*axes)
    return [
        Job(number, list(each), [word for word, is_swept in zip(each, swept, strict=True) if is_swept])
        for number, each in enumerate(combinations)
    ]


def _values(override: Override, config_dirs: Sequence[Path], problems: list[Problem]) -> list[str]:
    """Return one override word for each value of a sweep, the word itself where there is no sweep."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    key = override.get_key_element()
    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        problems.append(Problem(f"'{override.input_line}': an interval has no list of values.", f"{key}=range(1,10,3)"))
        return []
    if isinstance(value, Glob):
        group = override.key_or_group
        if group not in group_names():
            problems.append(Problem(f"'{override.input_line}': glob chooses options of a group.", "+recipe=glob(*)"))
            return []
        names = value.filter(list(options(group, config_dirs)))
        if not names:
            known = ", ".join(options(group, config_dirs))
            problems.append(Problem(f"'{override.input_line}' matches none of {known}.", f"{key}=glob(*)"))
        return [f"{key}={name}" for name in names]
    try:
        values = [f"{key}={each}" for each in itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1)]
    except HydraException as error:
        problems.append(Problem(f"'{override.input_line}': {error}.", f"{key}=A,B or {key}=range(1,4)"))
        return []
    if not values:
        problems.append(Problem(f"'{override.input_line}' has no values.", f"{key}=A,B"))
    return values


def _check(jobs: Sequence[Job], config_dirs: Sequence[Path]) -> Path:
    """Compose every job, mark and tell the invalid ones; returns the folder under which run folders are made."""
    root: Path | None = None
    errors: list[MoeflowError] = []
    for job in jobs:
        try:
            composition = compose_run(job.words, config_dirs)
        except MoeflowError as error:
            job.state, job.exit_code, job.error = "invalid", error.exit_code, str(error)
            errors.append(error)
            continue
        root = root or Path(composition.config.run.root).absolute()
        for notice in composition.notices:
            logger.info("note: job %d (%s): %s", job.number, job.name, notice)
    if root is None:
        # The same mistake in every job is told once.
        raise errors[0]
    for job in jobs:
        if job.state == "invalid":
            logger.error("job %d (%s) is not valid and will not run: %s", job.number, job.name, job.error)
    return root


def _make_folder(root: Path) -> Path:
    folder = root / "sweeps" / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{secrets.token_hex(3)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"the sweep folder {folder} cannot be made: {error.strerror}.", "run.root=FOLDER") from error
    return folder


def _run_all(jobs: Sequence[Job], folder: Path, flags: Sequence[str], runner: Runner) -> KeyboardInterrupt | None:
    """Run the valid jobs in order; returns what interrupted them, if anything did."""
    todo = [job for job in jobs if job.state == "waiting"]
    for place, job in enumerate(todo, start=1):
        own = next((word.partition("=")[2] for word in job.words if word.startswith("run.dir=")), None)
        job.run_dir = Path(own).absolute() if own else folder / f"{job.number:03d}"
        words = ["train", *flags, *job.words, *([] if own else [f"run.dir={_quoted(job.run_dir)}"])]
        logger.info("[%d/%d] %s", place, len(todo), job.name)
        started, stop = time.monotonic(), None
        try:
            job.exit_code = runner(job, words)
        except KeyboardInterrupt as error:
            stop = error
            job.state, job.exit_code = "interrupted", stopped_code(error)
        job.seconds = time.monotonic() - started
        summary = read_summary(RunDir(job.run_dir))
        job.metrics = {key: float(summary[key]) for key in RANKED_BY if isinstance(summary.get(key), (int, float))}
        if stop is not None:
            return stop
        job.state = "finished" if job.exit_code == 0 else "failed"
        if job.state == "failed":
            logger.error("job %d (%s) failed with exit code %s", job.number, job.name, job.exit_code)
    return None


def _quoted(path: Path) -> str:
    """Return a path as a value of Hydra's grammar."""
    text = str(path)
    return text if all(char.isalnum() or char in "/._-" for char in text) else "'" + text.replace("'", "\\'") + "'"


def run_process(job: Job, words: Sequence[str]) -> int:
    """Run one job as a process; an interrupt is passed on once, so that the job can save.

    Returns:
        The exit code.

    Raises:
        KeyboardInterrupt: the user interrupted; the job has ended.
    """
    # A session of its own: Ctrl-C on the terminal would otherwise reach the job twice.
    process = subprocess.Popen([sys.executable, "-m", "moeflow", *words], start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        logger.info("interrupting job %d; once more kills it", job.number)
        _signal_group(process, signal.SIGINT)
        try:
            process.wait(timeout=GRACE_S)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            _signal_group(process, signal.SIGKILL)
            process.wait()
        raise
    finally:
        if process.poll() is None:
            _signal_group(process, signal.SIGTERM)
            process.wait()


def _signal_group(process: subprocess.Popen, number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def rank(jobs: Sequence[Job]) -> tuple[str | None, list[Job]]:
    """Return the figure that the jobs are ranked by, and the jobs, the best first; those without it come last."""
    figure = next((key for key in RANKED_BY if any(key in job.metrics for job in jobs)), None)
    if figure is None:
        return None, list(jobs)
    sign = -1.0 if RANKED_BY[figure] else 1.0

    def place(job: Job) -> tuple[bool, float]:
        value = job.metrics.get(figure, float("nan"))
        return (value != value, 0.0 if value != value else sign * value)

    return figure, sorted(jobs, key=place)


def _write(folder: Path, jobs: Sequence[Job], ranking: tuple[str | None, list[Job]]) -> None:
    figure, ranked = ranking
    content: dict[str, Any] = {
        "command": command_line(),
        "ranked_by": figure,
        "ranking": [job.number for job in ranked],
        "jobs": [
            dataclasses.asdict(job) | {"run_dir": None if job.run_dir is None else str(job.run_dir)} for job in jobs
        ],
    }
    (folder / "sweep.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def print_table(jobs: Sequence[Job], ranking: tuple[str | None, list[Job]], folder: Path) -> None:
    """Print the ranking on stdout."""
    from rich.console import Console
    from rich.table import Table

    figure, ranked = ranking
    figures = [key for key in RANKED_BY if any(key in job.metrics for job in jobs)]
    table = Table(title=f"{len(jobs)} jobs, ranked by {figure or 'nothing: no job has a result'}", title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("job", overflow="fold")
    for key in figures:
        table.add_column(key, justify="right")
    table.add_column("time", justify="right")
    table.add_column("state")
    table.add_column("folder", overflow="fold")
    for place, job in enumerate(ranked, start=1):
        numbers = [f"{job.metrics[key]:.4f}" if key in job.metrics else "-" for key in figures]
        seconds = "-" if job.seconds is None else f"{job.seconds:.0f} s"
        state = job.state if job.exit_code in (None, 0) else f"{job.state} ({job.exit_code})"
        table.add_row(str(place), job.name, *numbers, seconds, state, "-" if job.run_dir is None else job.run_dir.name)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    print(f"results: {shown(folder / 'sweep.json')}")
