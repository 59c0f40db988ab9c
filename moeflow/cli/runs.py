"""What train, resume and check share: composing, making the run folder, and running in it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from moeflow.cli.interrupts import ending_at_once
from moeflow.cli.provenance import command_text, environment
from moeflow.config.changes import ABSENT, Change, differences, refused
from moeflow.config.paths import absolute_paths
from moeflow.config.plain import dump, load
from moeflow.config.problems import raise_any
from moeflow.errors import LaunchError, MoeflowError, stopped_code
from moeflow.logging import get_logger, rank
from moeflow.schema import RunConfig
from moeflow.train import rundir
from moeflow.train.rundir import RunDir
from moeflow.train.shelf import resume_command

logger = get_logger(__name__)

_STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM}


def new_run(config: RunConfig, base: RunConfig, overrides: Sequence[str]) -> RunDir:
    """Make the folder of a new run.

    Args:
        config: the checked configuration, paths as the user gave them.
        base: the recipe alone, or the defaults where there is none.
        overrides: the words of the command line.

    Raises:
        ConfigError: the folder cannot be made, or holds a run already.
    """
    config = absolute_paths(config)
    if config.run.name is None:
        config.run.name = config.run.recipe or rundir.NO_RECIPE
    files = {
        "overrides.yaml": yaml.safe_dump(list(overrides), allow_unicode=True),
        "recipe_diff.yaml": diff_text(differences(absolute_paths(base), config)),
        "command.txt": command_text(),
        "env.json": json.dumps(environment(), indent=2) + "\n",
    }
    return rundir.create(config, dump, files)


def diff_text(changes: Sequence[Change]) -> str:
    """Return changes as YAML: {key: {recipe: ..., run: ...}}, the run folder itself left out."""
    table = {
        change.key: {
            name: value for name, value in (("recipe", change.old), ("run", change.new)) if value is not ABSENT
        }
        for change in changes
        if not change.key.startswith("run.")
    }
    return yaml.safe_dump(table, sort_keys=False, allow_unicode=True)


def resumable(config: RunConfig) -> RunDir | None:
    """Lock and return the run that `resume=auto` goes on with: that in `run.dir`, else the recipe's newest that fits.

    A run fits when it has a checkpoint, steps are left, nobody trains in it, and it differs from `config` only in keys
    that may change on resume.  The one in `run.dir` fits without a checkpoint too: it starts anew in its folder, as
    after a crash before the first one.
    """
    if config.run.dir is not None:
        folder = Path(config.run.dir)
        candidates = [RunDir(folder.absolute())] if (folder / rundir.CONFIG).is_file() else []
    else:
        candidates = rundir.list_runs(Path(config.run.root).absolute() / (config.run.recipe or rundir.NO_RECIPE))
    for run in candidates:
        reason = _unfit(run, config, named=config.run.dir is not None)
        if reason is None:
            try:
                run.acquire()
                return run
            except LaunchError:
                reason = "it is running"  # another resume=auto was a moment earlier
        logger.info("resume=auto passes over %s: %s", run.path, reason)
    return None


def _unfit(run: RunDir, config: RunConfig, named: bool) -> str | None:
    step = run.latest_step()
    if step is None and not named:
        return "it has no checkpoint"
    if step is not None and step >= config.trainer.max_steps:
        return f"it is done (step {step} of {config.trainer.max_steps})"
    if run.in_use():
        return "it is running"
    try:
        changes = differences(load(run.config), in_folder(config, run))
    except MoeflowError as error:
        return f"its configuration cannot be read: {error.what}"
    problems = refused(changes)
    return f"other settings: {problems[0].what}" if problems else None


def in_folder(config: RunConfig, run: RunDir) -> RunConfig:
    """Return `config` as it is frozen in an existing run folder, which keeps what names the run."""
    old = load(run.config)
    config = absolute_paths(config)
    config.run.dir, config.run.root, config.run.recipe = old.run.dir, old.run.root, old.run.recipe
    config.run.name = config.run.name or old.run.name
    config.resume = old.resume
    return config


def update(run: RunDir, config: RunConfig, force: bool = False) -> list[Change]:
    """Freeze a changed configuration in the folder of a run that goes on; the old one is kept as config.N.yaml.

    The caller holds the folder's lock.  `supervised` takes the change back when no step could be trained with it.

    Returns:
        The changes; without any, the files stay as they are.

    Raises:
        ConfigError: a change needs --force; nothing was written then.
    """
    old = load(run.config)
    changes = differences(old, config)
    raise_any(refused(changes, force))
    moved = str(run.path) != old.run.dir
    config.run.dir = str(run.path)
    if changes or moved:
        kept = run.replace_config(dump(config))
        logger.info("changed configuration (the one before is %s):", kept.name)
        for change in changes:
            logger.info("  %s", change)
    with run.command.open("a", encoding="utf-8") as stream:
        stream.write(command_text())
    return changes


def supervised(start: Callable[[], int], runs: Sequence[RunDir]) -> int:
    """Call `start`, which trains, and write how it ended into status.json.

    A signal that comes before the training listens to signals ends the process at once.

    Args:
        start: returns the exit code.
        runs: the folder that this process answers for; `start` may put it there, and on other ranks it stays empty.
    """

    def interrupted(number: int) -> None:
        _mark(runs, "interrupted", exit_code=128 + number)
        _settle(runs, good=False)
        if rank() == 0:
            os.write(2, b"interrupted\n")

    try:
        with ending_at_once(interrupted):
            code = start()
    except KeyboardInterrupt as stop:
        _mark(runs, "interrupted", exit_code=stopped_code(stop))
        _settle(runs, good=False)
        raise
    except BaseException as error:
        if isinstance(error, MoeflowError) and "moeflow resume" not in str(error):
            error.then = next(map(_way_on, runs), None)
        _mark(runs, "failed", error=str(error).splitlines()[0] if str(error) else type(error).__name__)
        _settle(runs, good=False)
        raise
    _settle(runs, good=code == 0)
    for run in runs:
        if code not in {0, *_STOPPED} and (then := _way_on(run)):
            logger.warning("go on from the last checkpoint with: %s", then)
        _mark([run], _ended(run) if code == 0 else "interrupted" if code in _STOPPED else "failed", exit_code=code)
    return code


def _way_on(run: RunDir) -> str | None:
    """The command that goes on with a run that failed in the middle of training."""
    return resume_command(shown(run.path)) if run.status().get("begun") and run.latest_step() is not None else None


def _settle(runs: Sequence[RunDir], good: bool) -> None:
    for run in runs:
        try:
            if good:
                run.keep_config()
            elif run.take_back_config():
                logger.warning("no step was trained with the changes: %s is as it was before", shown(run.config))
        except OSError as error:
            logger.warning("%s cannot be put back: %s", run.config, error.strerror)


def _ended(run: RunDir) -> str:
    """Return how a run ended that ended well: "finished", or "interrupted" where steps are left (trainer.stop_at)."""
    state = read_summary(run).get("status")
    return state if state in rundir.STATES else "finished"


def read_summary(run: RunDir) -> dict[str, Any]:
    """Return the content of summary.json, {} where there is none that can be read."""
    try:
        summary = json.loads(run.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _mark(runs: Sequence[RunDir], state: str, **facts: Any) -> None:
    for run in runs:
        try:
            run.mark(state, **facts)
        except OSError as error:
            # The training itself has ended, well or not; that must stay the exit code.
            logger.warning("%s cannot be written: %s", run.path / rundir.STATUS, error.strerror)


def shown(path: Path) -> str:
    """Return a path as one would type it from here."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
