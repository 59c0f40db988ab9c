"""`moeflow generate`: text from a checkpoint of a run of a language model."""

from __future__ import annotations

import sys
from typing import Any

from moeflow import logging
from moeflow.cli.arguments import Arguments, add_verbosity
from moeflow.cli.resume import run_dir_first
from moeflow.config.changes import amend, differences
from moeflow.config.plain import load
from moeflow.config.problems import Problem, raise_any
from moeflow.errors import ConfigError
from moeflow.parallel.environment import detect
from moeflow.train import rundir

#: Keys that may differ from the run's: where and on what it is done, and where the text lies that holds the alphabet.
_FREE = ("data.path", "data.root", "launch.", "precision.", "ops.")


def main(argv: list[str]) -> int:
    """Run `moeflow generate`; returns the exit code."""
    parser = Arguments("generate", words="words")
    parser.flag("--prompt", metavar="TEXT", help="text to continue; the first words of the held-out text if left out")
    parser.flag("--tokens", metavar="N", default="300", help="tokens to add (300)")
    parser.flag("--temperature", metavar="T", default="0.8", help="0 takes the most probable token (0.8)")
    parser.flag("--top-k", metavar="K", help="draw from the K most probable tokens; from all if left out")
    parser.flag("--seed", metavar="S", default="0", help="of the draws (0)")
    parser.flag("--step", metavar="N", help="checkpoint to load; the latest if left out")
    add_verbosity(parser)
    args = parser.read(argv)
    if args.help:
        print(parser.help_text())
        return 0
    logging.setup(args.verbosity)
    numbers: dict[str, Any] = {
        "num_tokens": _number("--tokens", args.tokens, int, 0),
        "temperature": _number("--temperature", args.temperature, float, 0),
        "top_k": None if args.top_k is None else _number("--top-k", args.top_k, int, 1),
        "seed": _number("--seed", args.seed, int, 0),
        "step": None if args.step is None else _number("--step", args.step, int, 0),
    }
    folder, words = run_dir_first(args.words, "generate")
    launched = detect()
    if launched is not None and launched.world > 1:
        raise ConfigError(
            f"moeflow generate runs in one process; {launched.launcher} started {launched.world}.",
            f"moeflow generate {folder}",
        )
    run = rundir.open(folder)
    old = load(run.config)
    config = amend(old, words)
    fixed = [change for change in differences(old, config) if not change.key.startswith(_FREE)]
    raise_any(
        [
            Problem(f"{change}: the checkpoint was made with the old value.", f"leave {change.key} out")
            for change in fixed
        ]
    )
    from moeflow.train.sample import Request, continue_run  # brings torch

    print(continue_run(config, run.path, Request(prompt=args.prompt, **numbers)))
    sys.stdout.flush()
    return 0


def _number(flag: str, text: str, kind: type[int] | type[float], least: int) -> int | float:
    """Read the value of a flag.

    Raises:
        ConfigError: it is no number, or is too small.
    """
    try:
        value = kind(text)
    except ValueError:
        value = kind(-1)
    if not least <= value < 2**63:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{flag} {text}: must be {what} of at least {least}.", "moeflow generate --help")
    return value
