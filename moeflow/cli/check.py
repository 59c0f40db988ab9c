"""`moeflow check`: compose and check a configuration, or check a frozen one; nothing is started or written."""

from __future__ import annotations

from pathlib import Path

from moeflow import logging
from moeflow.cli.arguments import Arguments, add_config_dir, add_verbosity
from moeflow.cli.plan_text import plan_text
from moeflow.cli.train import compose_words
from moeflow.config.plain import load
from moeflow.config.rules import validate


def arguments() -> Arguments:
    """Return the flags of `moeflow check`."""
    parser = Arguments("check")
    add_config_dir(parser)
    add_verbosity(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run `moeflow check`; returns the exit code."""
    parser = arguments()
    args = parser.read(argv)
    if args.help:
        print(parser.help_text())
        print("\nmoeflow check FILE.yaml checks a frozen configuration (RUN_DIR/config.yaml).")
        return 0
    logging.setup(args.verbosity)
    if len(args.overrides) == 1 and args.overrides[0].endswith(".yaml"):
        validate(load(Path(args.overrides[0])))
        print(f"{args.overrides[0]} is a valid configuration")
        return 0
    print(plan_text(compose_words(args, None)))
    return 0
