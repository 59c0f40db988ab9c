"""`moeflow resume`: go on with a run from its latest checkpoint, some keys changed if need be."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from moeflow import logging
from moeflow.cli.arguments import Arguments, add_verbosity
from moeflow.config.changes import FREE, amend, differences, refused
from moeflow.config.plain import load
from moeflow.config.problems import raise_any
from moeflow.config.rules import validate
from moeflow.errors import CheckpointError, ConfigError
from moeflow.parallel.environment import Launched, detect
from moeflow.schema import RunConfig
from moeflow.train import rundir
from moeflow.train.rundir import RunDir
from moeflow.train.shelf import Shelf

logger = logging.get_logger(__name__)


def arguments() -> Arguments:
    """Return the flags of `moeflow resume`."""
    parser = Arguments("resume", words="words")
    parser.flag("--force", action="store_true", help="take changes of the model, the gate or the data too")
    parser.flag("--dry-run", action="store_true", help="say what would change, and stop")
    parser.flag("--step", metavar="N", help="checkpoint to go on from; the latest where left out")
    add_verbosity(parser)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    """Run `moeflow resume`; returns the exit code."""
    parser = arguments()
    args = parser.read(argv)
    if args.help:
        print(f"{parser.help_text()}\n\n{_free_text()}")
        return 0
    logging.setup(args.verbosity)
    folder, words = run_dir_first(args.words, "resume")
    wanted = step_number(args.step)
    launched = detect()
    if launched is not None and not args.dry_run:
        from moeflow.cli.train import train_as_rank

        return train_as_rank(launched, lambda: _prepare(rundir.open(folder), words, args.force, launched, wanted))
    run = rundir.open(folder)
    if args.dry_run:
        _show_changes(run, words, args.force, wanted)
        return 0
    run = _prepare(run, words, args.force, None, wanted)
    try:
        return _start(run)
    finally:
        run.release()


def run_dir_first(words: list[str], verb: str) -> tuple[str, list[str]]:
    """Return the run folder and the overrides after it.

    Raises:
        ConfigError: the first word is missing or is an override.
    """
    if not words or ("=" in words[0] and not words[0].startswith((".", "/"))):
        what = f"moeflow {verb} needs a run folder as its first word."
        raise ConfigError(what, f"moeflow {verb} RUN_DIR (moeflow ls shows them)")
    for word in words[1:]:
        if "=" not in word and Path(word).exists():
            raise ConfigError(f"moeflow {verb} takes one run folder, and '{word}' is another one.", "give it alone")
    return words[0], words[1:]


def step_number(text: str | None) -> int | None:
    """Return the number that `--step` was given, None where it was left out.

    Raises:
        ConfigError: it is no number.
    """
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"--step {text} is not the number of a step.", "--step 1000, or leave it out for the latest")
    return int(text)


def _step(run: RunDir, wanted: int | None) -> int | None:
    """Return the step to go on from; None where nothing was saved."""
    if wanted is not None:
        Shelf(run.checkpoints).path(wanted)  # raises where there is none
        return wanted
    return run.latest_step()


def _prepare(
    run: RunDir, words: list[str], force: bool, launched: Launched | None, wanted: int | None = None
) -> RunDir:
    """Check the changes, lock the folder, freeze the new configuration; returns the locked run, marked as running."""
    from moeflow.cli.runs import shown, update

    step = _step(run, wanted)
    if not run.in_use() and run.take_back_config():
        logger.info("no step was trained with the changes of the last resume: they are taken back")
    config = _amended(run, words, launched, step)
    raise_any(refused(differences(load(run.config), config), force))
    if step is None:
        raise CheckpointError(
            f"{shown(run.path)} has no checkpoint to go on from.", f"start anew: {_first_command(run)}"
        )
    run.acquire()
    try:
        update(run, config, force)
        if wanted is not None:
            Shelf(run.checkpoints).point(wanted)
        run.mark("running", forced=force)
    except BaseException:
        run.release()
        raise
    logger.info("resuming %s at step %d", shown(run.path), step)
    return run


def _first_command(run: RunDir) -> str:
    """The command that made the run, without the folder that it took."""
    lines = run.command.read_text(encoding="utf-8").splitlines() if run.command.is_file() else []
    commands = [line for line in lines if not line.startswith("#")]
    try:
        words = shlex.split(commands[0])
    except (IndexError, ValueError):  # none, or a word of several lines
        words = ["moeflow", "train", "..."]
    return shlex.join(word for word in words if not word.startswith("run.dir="))


def _amended(run: RunDir, words: list[str], launched: Launched | None, step: int | None) -> RunConfig:
    old = load(run.config)
    config = amend(old, words)
    if launched is not None:
        config.launch.processes = launched.world
    stop_at = config.trainer.stop_at
    if stop_at is not None and stop_at == old.trainer.stop_at and step is not None and step >= stop_at:
        # The stop was for the part that is done; to stop there again would do nothing.
        config.trainer.stop_at = None
    validate(config)
    return config


def _show_changes(run: RunDir, words: list[str], force: bool, wanted: int | None) -> None:
    step = _step(run, wanted)
    changes = differences(load(run.config), _amended(run, words, None, step))
    raise_any(refused(changes, force))
    for change in changes:
        print(f"changed     {change}")
    print(f"checkpoint  step {step}\nnothing was started or written")


def _start(run: RunDir) -> int:
    from moeflow.cli.runs import supervised

    def start() -> int:
        from moeflow.train.launch import launch

        return launch(load(run.config), str(run.path), resume=True)

    return supervised(start, [run])


def _free_text() -> str:
    width = max(map(len, FREE))
    lines = [f"  {pattern:<{width}}  {text}" for pattern, text in FREE.items()]
    return "\n".join(["keys that may change (any other one needs --force):", *lines])
