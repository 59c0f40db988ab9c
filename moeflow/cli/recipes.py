"""`moeflow recipes`: the recipes that `+recipe=NAME` finds."""

from __future__ import annotations

from pathlib import Path

from moeflow.cli.arguments import Arguments, add_config_dir
from moeflow.cli.help import recipes_text
from moeflow.config.options import check_config_dirs


def main(argv: list[str]) -> int:
    """List the recipes; returns the exit code."""
    arguments = Arguments("recipes", words=None)
    add_config_dir(arguments)
    args = arguments.read(argv)
    if args.help:
        print(arguments.help_text())
        return 0
    folders = [Path(folder) for folder in args.config_dir]
    check_config_dirs(folders)
    print(recipes_text(folders))
    return 0
