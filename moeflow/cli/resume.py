"""`moeflow resume`: go on with a run from its latest checkpoint, some keys changed if need be."""

from __future__ import annotations

import argparse

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

logger = logging.get_logger(__name__)


def arguments() -> Arguments:
    """Return the flags of `moeflow resume`."""
    parser = Arguments("resume", words="words")
    parser.flag("--force", action="store_true", help="take changes of the model, the gate or the data too")
    parser.flag("--dry-run", action="store_true", help="say what would change, and stop")
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
    launched = detect()
    if launched is not None and not args.dry_run:
        from moeflow.cli.train import train_as_rank

        return train_as_rank(launched, lambda: _prepare(rundir.open(folder), words, args.force, launched))
    run = rundir.open(folder)
    if args.dry_run:
        _show_changes(run, words, args.force)
        return 0
    run = _prepare(run, words, args.force, None)
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
        raise ConfigError(what, f"moeflow {verb} RUN_DIR (ls -d outputs/*/* shows them)")
    return words[0], words[1:]


def _prepare(run: RunDir, words: list[str], force: bool, launched: Launched | None) -> RunDir:
    """Check the changes, lock the folder, freeze the new configuration; returns the locked run, marked as running."""
    from moeflow.cli.runs import shown, update

    config = _amended(run, words, launched)
    raise_any(refused(differences(load(run.config), config), force))
    step = run.latest_step()
    if step is None:
        command = (
            run.command.read_text(encoding="utf-8").splitlines()[-1] if run.command.is_file() else "moeflow train ..."
        )
        raise CheckpointError(f"{shown(run.path)} has no checkpoint to go on from.", f"start anew: {command}")
    run.acquire()
    try:
        update(run, config, force)
        run.mark("running")
    except BaseException:
        run.release()
        raise
    logger.info("resuming %s at step %d", shown(run.path), step)
    return run


def _amended(run: RunDir, words: list[str], launched: Launched | None) -> RunConfig:
    old = load(run.config)
    config = amend(old, words)
    if launched is not None:
        config.launch.processes = launched.world
    stop_at, step = config.trainer.stop_at, run.latest_step()
    if stop_at is not None and stop_at == old.trainer.stop_at and step is not None and step >= stop_at:
        # The stop was for the part that is done; to stop there again would do nothing.
        config.trainer.stop_at = None
    validate(config)
    return config


def _show_changes(run: RunDir, words: list[str], force: bool) -> None:
    changes = differences(load(run.config), _amended(run, words, None))
    raise_any(refused(changes, force))
    for change in changes:
        print(f"changed     {change}")
    print(f"checkpoint  step {run.latest_step()}\nnothing was started or written")


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
