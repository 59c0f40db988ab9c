"""The words of the command line, sorted into choices of options and values of keys, with Hydra's own grammar."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from moeflow.config.build import show
from moeflow.config.keys import all_key_names, nearest_key
from moeflow.config.options import EXTRA_GROUPS, default_choices, group_names, options
from moeflow.config.problems import Problem
from moeflow.errors import did_you_mean, nearest


@dataclasses.dataclass(frozen=True, slots=True)
class ValueOverride:
    """`optim.lr=3e-4`: the text as given, the dotted key and the value."""

    text: str
    key: str
    value: Any

    def as_tree(self) -> dict[str, Any]:
        """Return the override as the nested dict a file would hold."""
        tree: Any = self.value
        for part in reversed(self.key.split(".")):
            tree = {part: tree}
        return tree


@dataclasses.dataclass(slots=True)
class Request:
    """What a command line asks for.

    Attributes:
        groups: {group: option} that it chooses; the last one counts where a group is named twice.
        values: overrides of keys, in order.
        problems: what is wrong with the words themselves.
    """

    groups: dict[str, str] = dataclasses.field(default_factory=dict)
    values: list[ValueOverride] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)

    @property
    def recipe(self) -> str | None:
        return self.groups.get("recipe")

    def hydra_overrides(self, values: Iterable[ValueOverride] | None = None) -> list[str]:
        """Return the words for Hydra: plain groups, the recipe, the debug option over it, then the values."""
        plain = [f"{group}={option}" for group, option in self.groups.items() if group not in EXTRA_GROUPS]
        extra = [f"+{group}={self.groups[group]}" for group in EXTRA_GROUPS if group in self.groups]
        return [
            *plain,
            *extra,
            *(value.text for value in (self.values if values is None else values)),
        ]


def parse_words(words: Sequence[str], problems: list[Problem], config_dirs: Sequence[Path] = ()) -> list[Override]:
    """Parse overrides by Hydra's grammar; those that do not parse become problems."""
    parser = OverridesParser.create()
    parsed = []
    for word in words:
        try:
            parsed.append(parser.parse_override(word))
        except (HydraException, ValueError, RecursionError) as error:  # the latter two: huge numbers, deep nesting
            problems.append(_syntax_problem(word, error, config_dirs))
    return parsed


def read_request(words: Sequence[str], config_dirs: Sequence[Path] = ()) -> Request:
    """Sort the words of a command line; whatever is wrong with them is collected in the result's `problems`."""
    request = Request()
    for override in parse_words(words, request.problems, config_dirs):
        problem = _general_problem(override)
        if problem is None and override.key_or_group in group_names() and not isinstance(override.value(), dict):
            problem = check_option(override.key_or_group, override.value(), config_dirs)
            if problem is None:
                request.groups[override.key_or_group] = str(override.value())
        elif problem is None:
            request.values.append(ValueOverride(str(override.input_line), override.key_or_group, override.value()))
        if problem is not None:
            request.problems.append(problem)
    return request


def check_option(group: str, name: Any, config_dirs: Sequence[Path] = ()) -> Problem | None:
    """Return the problem of choosing `name` in a group, or None when there is such an option."""
    known = options(group, config_dirs)
    if isinstance(name, str) and name in known:
        return None
    sign = "+" if group in EXTRA_GROUPS else ""
    if name is None or isinstance(name, list):
        return Problem(
            f"{sign}{group}={show(name)}: a group takes the name of one option.",
            f"one of {', '.join(known)}",
        )
    close = nearest(str(name), known)
    what = f"{sign}{group}={name}: there is no {group} '{name}'.{did_you_mean(str(name), known)}"
    more = "; --config-dir DIR adds DIR/recipe/*.yaml" if group == "recipe" else ""
    listed = f"one of {', '.join(known) or '(none found)'}{more}"
    return Problem(what, f"{sign}{group}={close} ({listed})" if close else listed)


def _general_problem(override: Override) -> Problem | None:
    key, text = override.key_or_group, override.input_line
    if not key:
        return Problem(f"'{text}' is not an override. The key before '=' is missing.", "KEY=VALUE")
    if override.is_sweep_override():
        return Problem(
            f"'{text}' names several values, which only a sweep takes.",
            f"moeflow train --multirun ... '{text}', or for a list {key}=[...], or for a text {key}='\"...\"'",
        )
    if override.is_hydra_override():
        return Problem(
            f"'{text}': moeflow drives Hydra itself.",
            "run.dir=DIR sets the run folder, --config-dir DIR adds files",
        )
    if override.package is not None:
        return Problem(
            f"'{text}': groups of moeflow have one place each.",
            f"{key}=OPTION, without @{override.package}",
        )
    if override.is_delete():
        rest = "another option" if key in group_names() else "null where the key allows it"
        return Problem(
            f"'{text}': keys and groups cannot be taken away.",
            f"{key}=VALUE; give {rest}",
        )
    return None


def _syntax_problem(word: str, error: Exception, config_dirs: Sequence[Path]) -> Problem:
    what = f"'{word}' is not an override."
    if "=" not in word:
        return Problem(
            f"{what} Overrides read KEY=VALUE.",
            _guess_missing_equals(word, config_dirs),
        )
    key, _, value = word.partition("=")
    if not key.lstrip("+~") or " " in key.strip():
        return Problem(
            f"{what} The key before '=' is no name.",
            "KEY=VALUE, without spaces around '='",
        )
    if re.search(r"\s[+~]?[\w./]+=", value):
        return Problem(f"{what} It holds several.", "give each KEY=VALUE as a word of its own")
    grammar = str(error).splitlines()[0] if str(error) else "bad value"
    return Problem(
        f"{what} The value of {key} cannot be read ({grammar}).",
        f"quote it: '{key}=\"{value}\"'",
    )


def _guess_missing_equals(word: str, config_dirs: Sequence[Path]) -> str:
    for group in (*EXTRA_GROUPS, *default_choices()):
        if word.lstrip("+") in options(group, config_dirs):
            return f"{'+' if group in EXTRA_GROUPS else ''}{group}={word.lstrip('+')}"
    if word.endswith((".yaml", ".yml")):
        return "put the file at DIR/recipe/NAME.yaml and give --config-dir DIR +recipe=NAME"
    key = nearest_key(word.partition(" ")[0].lstrip("+~"), [*all_key_names(), *group_names()])
    return f"{key or 'KEY'}=VALUE"
