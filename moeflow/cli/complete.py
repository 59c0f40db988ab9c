"""Candidates for the shell completion scripts: `moeflow _complete SHELL LINE`.

Everything is read off the schema and the folders; Hydra and torch are not imported, so that TAB answers at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from moeflow.cli.verbs import VERBS
from moeflow.config.build import show
from moeflow.config.keys import POLYMORPHIC, Key, default_classes, iter_keys, section_class
from moeflow.config.options import EXTRA_GROUPS, default_choices, group_names, options
from moeflow.config.plain import load
from moeflow.config.recipes import RecipeBook
from moeflow.errors import MoeflowError
from moeflow.train import rundir

_DIR_FLAGS = ("-cd", "--config-dir")


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """One word that may stand at the cursor; `whole` when nothing is to follow it directly."""

    word: str
    help: str = ""
    whole: bool = True


def main(argv: list[str]) -> int:
    """Print the candidates for argv[1], the command line up to the cursor, in the form that the shell argv[0] wants."""
    shell, line = [*argv, "", ""][:2]
    for candidate in candidates(line):
        if shell == "bash":
            print(candidate.word + (" " if candidate.whole else ""))
        else:
            print(f"{candidate.word}\t{candidate.help}")
    return 0


def candidates(line: str) -> list[Candidate]:
    """Return what may stand at the end of `line`."""
    words, current = _split(line)
    if not words:
        verbs = [Candidate(verb.name, verb.summary) for verb in VERBS.values() if not verb.hidden]
        found: Iterable[Candidate] = [
            *verbs,
            Candidate("--help", "show help"),
            Candidate("--version", "print the version"),
        ]
    else:
        found = _after_verb(words[0], words[1:], current)
    return [candidate for candidate in found if candidate.word.startswith(current)]


def _split(line: str) -> tuple[list[str], str]:
    """Return the finished words after `moeflow`, and the word at the cursor."""
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote
        words = line.replace("'", "").replace('"', "").split()
    if not line or line[-1].isspace():
        words.append("")
    return words[1:-1], words[-1] if len(words) > 1 else ""


def _after_verb(verb: str, words: list[str], current: str) -> Iterable[Candidate]:
    if verb not in VERBS or (words and words[-1] in _DIR_FLAGS):
        return []
    if words and words[-1] == "--cfg":
        return [Candidate("job")]
    if current.startswith("-"):
        return _flags(verb)
    if verb == "recipes":
        return _recipe_names(words)
    if verb == "ls":
        return _folders_of_runs()
    if verb == "completion":
        return [Candidate(shell) for shell in ("bash", "zsh", "fish")] if not words else []
    if VERBS[verb].usage.startswith("[+recipe=NAME]"):
        return _overrides(words, current, with_recipe=True)
    if VERBS[verb].usage.startswith(("RUN_DIR RUN_DIR", "RUN_DIR ...")):
        return (each for each in _run_dirs(current) if each.word not in words)
    if VERBS[verb].usage.startswith("RUN_DIR"):
        positional = [word for word in words if not word.startswith("-")]
        return _overrides(positional, current, with_recipe=False) if positional else _run_dirs(current)
    return []


def _flags(verb: str) -> Iterator[Candidate]:
    module = importlib.import_module(VERBS[verb].module)
    if hasattr(module, "arguments"):
        for names, text in module.arguments().shown:
            yield from (Candidate(name.strip().partition(" ")[0], text) for name in names.split(","))
    else:
        yield Candidate("--help", "show help")


def _recipe_names(words: list[str]) -> Iterator[Candidate]:
    if not any(not word.startswith("-") for word in words):
        for option in options("recipe", []).values():
            yield Candidate(option.name, option.summary)


def _folders_of_runs() -> Iterator[Candidate]:
    folders = dict.fromkeys(config.parent.parent for config in sorted(Path("outputs").glob(f"*/*/{rundir.CONFIG}")))
    yield from (Candidate(str(folder)) for folder in ([Path("outputs"), *folders] if folders else []))


def _run_dirs(current: str) -> Iterator[Candidate]:
    for config in sorted(Path("outputs").glob(f"*/*/{rundir.CONFIG}"), reverse=True):
        yield Candidate(str(config.parent))
    if "/" in current:
        for config in sorted(Path(current).parent.glob(f"*/{rundir.CONFIG}"), reverse=True):
            yield Candidate(str(config.parent))


def _overrides(words: list[str], current: str, with_recipe: bool) -> Iterable[Candidate]:
    folders = [Path(folder) for flag, folder in itertools.pairwise(words) if flag in _DIR_FLAGS]
    keys = {key.name: key for key in iter_keys(_classes(words, folders, with_recipe))}
    if "=" in current:
        return _values(current, keys, folders)
    groups = [group for group in group_names() if with_recipe or group not in EXTRA_GROUPS]
    found = [Candidate(f"{'+' if group in EXTRA_GROUPS else ''}{group}=", "group", whole=False) for group in groups]
    if "." in current:
        return [Candidate(f"{key.name}=", key.field.help, whole=False) for key in keys.values()]
    sections = dict.fromkeys(name.partition(".")[0] for name in keys if "." in name)
    found += [Candidate(f"{section}.", f"keys of {section}", whole=False) for section in sections]
    return found + [Candidate(f"{name}=", key.field.help, whole=False) for name, key in keys.items() if "." not in name]


def _classes(words: list[str], folders: list[Path], with_recipe: bool) -> dict[str, type]:
    """Return the class of each polymorphic section, as far as the words before the cursor tell."""
    classes = default_classes()
    try:
        if not with_recipe:
            frozen = load(Path(words[0]) / rundir.CONFIG)
            return {section: type(getattr(frozen, section)) for section in POLYMORPHIC}
        stated = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
        recipe = stated.get("recipe")
        choices = RecipeBook(folders).choices(recipe) if recipe else dict(default_choices())
    except MoeflowError:
        # The command itself will tell what is wrong; TAB offers what is certain.
        return classes
    choices |= {group: option for group, option in stated.items() if group in POLYMORPHIC}
    return {section: section_class(section, choices[section]) or base for section, base in classes.items()}


def _values(current: str, keys: dict[str, Key], folders: list[Path]) -> Iterator[Candidate]:
    name, _, value = current.partition("=")
    # In a sweep several values stand behind each other: A,B,C.
    before = f"{name}={value[: value.rfind(',') + 1]}"
    plain = name.lstrip("+")
    if plain in group_names():
        for option in options(plain, folders).values():
            yield Candidate(before + option.name, option.summary)
    elif plain in keys:
        field = keys[plain].field
        values = [str(choice) for choice in field.choices] or (["true", "false"] if field.kind is bool else [])
        if not values and "path" not in field.metadata:
            values = [show(field.default)]
        values += ["null"] if field.optional and "null" not in values else []
        for each in values:
            yield Candidate(before + each, field.help)
