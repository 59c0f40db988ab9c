"""`moeflow train`: compose, check, make the run folder, train; or show what would be done."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moeflow import logging
from moeflow.cli.arguments import Arguments, add_config_dir, add_verbosity
from moeflow.errors import ConfigError, LaunchError, MoeflowError
from moeflow.parallel.environment import Launched, detect

if TYPE_CHECKING:
    from moeflow.config.composition import Composition
    from moeflow.schema import RunConfig
    from moeflow.train.rundir import RunDir

logger = logging.get_logger(__name__)


def arguments() -> Arguments:
    """Return the flags of `moeflow train`."""
    parser = Arguments("train")
    parser.flag("--cfg", metavar="job", choices=["job"], help="print the composed configuration and stop")
    parser.flag("--resolve", action="store_true", help="with --cfg: interpolations resolved")
    parser.flag("--dry-run", action="store_true", help="compose, check, say what would run, and stop")
    parser.flag("-m", "--multirun", action="store_true", help="sweep: KEY=A,B, KEY=range(1,4), '+recipe=glob(cifar_*)'")
    add_config_dir(parser)
    add_verbosity(parser)
    # The deepspeed launcher adds it; the rank is read from the environment, as with every launcher.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    """Run `moeflow train`; returns the exit code."""
    parser = arguments()
    args = parser.read(argv)
    if args.help:
        from moeflow.cli.help import groups_text, keys_text, recipes_text

        folders = [Path(folder) for folder in args.config_dir]
        parts = (parser.help_text(), groups_text(folders), recipes_text(folders), keys_text())
        print("\n\n".join(parts))
        return 0
    logging.setup(args.verbosity)
    launched = detect()
    if args.multirun:
        return _sweep(args, launched)
    if launched is not None and not (args.cfg or args.dry_run):
        return _as_rank(args, launched)
    composition = compose_words(args, launched)
    if args.cfg:
        print(composition.yaml(resolve=args.resolve), end="")
        return 0
    if args.dry_run:
        from moeflow.cli.plan_text import plan_text

        print(plan_text(composition, None if launched is None else launched.world))
        return 0
    return _start(composition)


def compose_words(args: argparse.Namespace, launched: Launched | None) -> Composition:
    """Compose and check what the command line asks for, and print its notices.

    Raises:
        ConfigError: lists every problem; also where nothing at all is asked for.
    """
    if not args.overrides:
        raise ConfigError("nothing to train was named.", "moeflow train +recipe=NAME (moeflow recipes lists them)")
    # Importing Hydra and composing make many objects and no garbage: collections would cost an eighth of the time.
    gc.disable()
    try:
        from moeflow.config.composition import compose_run

        composition = compose_run(args.overrides, args.config_dir, None if launched is None else launched.world)
    finally:
        gc.enable()
    for notice in composition.notices:
        logger.info("note: %s", notice)
    return composition


def _start(composition: Composition) -> int:
    """Train in this process, or in processes that it starts."""
    from moeflow.cli.runs import supervised
    from moeflow.config.plain import load

    run, resume = _folder(composition)

    def start() -> int:
        from moeflow.train.launch import launch

        return launch(load(run.config), str(run.path), resume)

    try:
        return supervised(start, [run])
    finally:
        run.release()


def _as_rank(args: argparse.Namespace, launched: Launched) -> int:
    """Train as one of the ranks that a launcher started; rank 0 composes and makes the folder, the others learn it."""

    def decide() -> RunDir:
        composition = compose_words(args, launched)
        composition.config.launch.processes = launched.world
        return _folder(composition)[0]

    return train_as_rank(launched, decide)


def train_as_rank(launched: Launched, decide: Callable[[], RunDir]) -> int:
    """Train in a process that a launcher started.

    Args:
        launched: what the launcher left.
        decide: returns the locked folder; called on rank 0 alone, its MoeflowError reaches every rank.
    """
    from moeflow.cli.runs import supervised
    from moeflow.cli.worker import report
    from moeflow.config.plain import load
    from moeflow.train.launch import run_from_launcher

    runs: list[RunDir] = []
    agreed: list[Path] = []

    def decide_path() -> str:
        # The lock is given free at the end of the process, however it ends.
        runs.append(decide())
        return str(runs[0].path)

    def read(run_dir: str) -> RunConfig:
        agreed.append(Path(run_dir))
        return load(agreed[0] / "config.yaml")

    try:
        # A new folder holds no checkpoint, so that `resume` makes no difference there.
        return supervised(lambda: run_from_launcher(launched, decide_path, read, resume=True), runs)
    except MoeflowError as error:
        if agreed:
            report(error, agreed[0])
        elif launched.rank == 0:
            raise
        return error.exit_code


def _folder(composition: Composition) -> tuple[RunDir, bool]:
    """Return the locked folder of the run, marked as running, and whether it goes on from a checkpoint there."""
    from moeflow.cli.runs import in_folder, new_run, resumable, shown, update
    from moeflow.config.composition import compose_run

    config = composition.config
    run = resumable(config) if config.resume == "auto" else None
    if run is not None:
        logger.info("resume=auto: going on with %s", shown(run.path))
        update(run, in_folder(config, run))
    else:
        words = [f"+recipe={composition.recipe}"] if composition.recipe else []
        base = compose_run(words, composition.config_dirs, rules=False).config
        run = new_run(config, base, composition.overrides)
        run.acquire()
    run.mark("running")
    return run, run.latest_step() is not None


def _sweep(args: argparse.Namespace, launched: Launched | None) -> int:
    if launched is not None:
        raise LaunchError(
            f"a sweep starts its own processes, but {launched.launcher} started {launched.world} of them already.",
            "moeflow train --multirun ... without the launcher, with launch.processes=N",
        )
    if args.cfg or args.dry_run:
        raise ConfigError("--multirun does not go together with --cfg or --dry-run.", "leave one of them out")
    from moeflow.cli.sweep import sweep

    return sweep(args.overrides, args.config_dir, args.verbosity)
