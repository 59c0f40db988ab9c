"""Flags of the sub-commands, by argparse, with moeflow's way of reporting mistakes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from moeflow.cli.verbs import VERBS
from moeflow.errors import ConfigError, did_you_mean


class Arguments(argparse.ArgumentParser):
    """Flags and words of one sub-command; flags may stand anywhere among the words.

    Args:
        verb: name of the sub-command.
        words: name of the positional words, None where there are none.
    """

    def __init__(self, verb: str, words: str | None = "overrides"):
        super().__init__(prog=f"moeflow {verb}", add_help=False, allow_abbrev=False)
        self.verb = verb
        self.shown: list[tuple[str, str]] = []
        if words is not None:
            self.add_argument(words, nargs="*")
        self.flag("-h", "--help", action="store_true", help="show this help")

    def flag(self, *names: str, help: str, **details: Any) -> None:
        """Add a flag; `help` is its line in the help text."""
        self.add_argument(*names, help=help, **details)
        value = f" {details['metavar']}" if "metavar" in details else ""
        self.shown.append((", ".join(names) + value, help))

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the words.

        Raises:
            ConfigError: a flag is unknown or lacks its value.
        """
        args, rest = self.parse_known_intermixed_args(list(argv))
        if rest:
            flags = [name for action in self._actions for name in action.option_strings]
            hint = did_you_mean(rest[0].partition("=")[0], flags)
            raise ConfigError(f"moeflow {self.verb} has no flag '{rest[0]}'.{hint}", f"moeflow {self.verb} --help")
        return args

    def error(self, message: str) -> NoReturn:
        """Report what argparse found as an error of the MoeflowError family."""
        raise ConfigError(f"moeflow {self.verb}: {message}.", f"moeflow {self.verb} --help")

    def help_text(self) -> str:
        """Return usage, summary and flags."""
        verb = VERBS[self.verb]
        width = max(len(names) for names, _ in self.shown)
        flags = [f"  {names:<{width}}  {text}" for names, text in self.shown]
        summary = f"{verb.summary[0].upper()}{verb.summary[1:]}."
        return "\n".join(
            [f"usage: moeflow {verb.name} [FLAGS] {verb.usage}".rstrip(), "", summary, "", "flags:", *flags]
        )


def add_config_dir(arguments: Arguments) -> None:
    """Add --config-dir."""
    arguments.flag(
        "-cd",
        "--config-dir",
        metavar="DIR",
        action="append",
        default=[],
        help="folder with your own DIR/recipe/NAME.yaml, DIR/gate/NAME.yaml, ... (may be repeated)",
    )


def add_verbosity(arguments: Arguments) -> None:
    """Add -q and -v; `verbosity` of the result is -1, 0 or 1."""
    arguments.flag("-q", "--quiet", dest="verbosity", action="store_const", const=-1, default=0, help="warnings only")
    arguments.flag("-v", "--verbose", dest="verbosity", action="store_const", const=1, default=0, help="tell more")
