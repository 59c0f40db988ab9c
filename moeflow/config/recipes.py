"""Recipes: the files behind `+recipe=NAME`, what they choose, and which of their values a run takes.

The rule of a switched option.  A value that a recipe states under a group (`gate.capacity_factor`) was written for the
option that the recipe chose there (`gate=gshard`).  When the command line, or a recipe built on it, chooses another
option, that section starts from the new option's own defaults: the recipe's values under it do not apply, and the run
says so.  Sections whose option stays, and overrides on the command line, are untouched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moeflow.config.build import show
from moeflow.config.options import Option, default_choices, options
from moeflow.config.plain import parse_yaml, read_text
from moeflow.errors import ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe file.

    Attributes:
        name: what stands after `+recipe=`.
        path: the file.
        body: its keys without the defaults list.
        defaults: its defaults list as it stands.
        parents: recipes that it builds on, in order.
        choices: options that it chooses itself, {group: option}.
    """

    name: str
    path: Path
    body: dict[str, Any]
    defaults: list[Any]
    parents: tuple[str, ...]
    choices: dict[str, str]

    @property
    def where(self) -> str:
        return f"recipe '{self.name}' ({self.path})"


def read_recipe(option: Option) -> Recipe:
    """Read a recipe file.

    Raises:
        ConfigError: the file is unreadable, no YAML, or its defaults list is malformed.
    """
    content = parse_yaml(read_text(option.path, "recipe"), str(option.path))
    content = {} if content is None else content
    where = f"recipe '{option.name}' ({option.path})"
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where} is not a table of keys but {show(content)}.",
            "write it as KEY: VALUE lines",
        )
    defaults = content.get("defaults", [])
    parents: list[str] = []
    choices: dict[str, str] = {}
    if not isinstance(defaults, list):
        raise ConfigError(
            f"{where}: 'defaults' must be a list, not {show(defaults)}.",
            "defaults: [override /gate: switch]",
        )
    for item in defaults:
        if isinstance(item, str):
            if item != "_self_":
                parents.append(item.removeprefix("/recipe/").partition("@")[0])
        elif isinstance(item, dict) and len(item) == 1 and isinstance(next(iter(item.values())), str):
            ((key, value),) = item.items()
            choices[_group_of(str(key), value, where)] = value
        else:
            raise ConfigError(
                f"{where}: {show(item)} has no place in a defaults list.",
                "- override /GROUP: OPTION",
            )
    body = {key: value for key, value in content.items() if key != "defaults"}
    return Recipe(option.name, option.path, body, defaults, tuple(parents), choices)


def _group_of(key: str, value: str, where: str) -> str:
    words = key.split()
    group = words[-1].lstrip("/").partition("@")[0] if words else ""
    if group not in default_choices():
        hint = did_you_mean(group, default_choices())
        raise ConfigError(
            f"{where}: '{key}' in its defaults list names no group.{hint}",
            f"- override /GROUP: {value}",
        )
    if words[:-1] != ["override"] or not words[-1].startswith("/"):
        raise ConfigError(
            f"{where}: '{key}: {value}' in its defaults list must replace the primary choice.",
            f"- override /{group}: {value}",
        )
    return group


class RecipeBook:
    """The recipes at hand; each file is read when it is first asked for."""

    def __init__(self, config_dirs: Iterable[Path] = ()):
        self.options = options("recipe", config_dirs)
        self._read: dict[str, Recipe] = {}

    def get(self, name: str, asked_by: str | None = None) -> Recipe:
        """Return one recipe.

        Args:
            name: its name.
            asked_by: what named it, for the message.

        Raises:
            ConfigError: there is no such recipe, or its file is faulty.
        """
        if name not in self.options:
            hint = did_you_mean(name, self.options)
            names = ", ".join(self.options) or "none"
            raise ConfigError(
                f"{asked_by + ': ' if asked_by else ''}there is no recipe '{name}'.{hint} Recipes: {names}.",
                "moeflow recipes lists them; --config-dir DIR adds DIR/recipe/*.yaml",
            )
        if name not in self._read:
            self._read[name] = read_recipe(self.options[name])
        return self._read[name]

    def chain(self, name: str) -> list[Recipe]:
        """Return a recipe and all that it builds on, the oldest first.

        Raises:
            ConfigError: a recipe is missing or faulty, or recipes build on each other in a circle.
        """
        return list(self._walk(name, ()).values())

    def _walk(self, name: str, below: tuple[str, ...]) -> dict[str, Recipe]:
        if name in below:
            circle = " -> ".join((*below[below.index(name) :], name))
            raise ConfigError(
                f"recipes build on each other in a circle: {circle}.",
                f"edit {self.get(name).path}",
            )
        recipe = self.get(name, asked_by=self.get(below[-1]).where if below else None)
        found: dict[str, Recipe] = {}
        for parent in recipe.parents:
            found |= self._walk(parent, (*below, name))
        return found | {name: recipe}

    def choices(self, name: str) -> dict[str, str]:
        """Return {group: option} that a recipe stands for: the primary defaults, its parents' choices, its own."""
        merged = dict(default_choices())
        for recipe in self.chain(name):
            merged |= recipe.choices
        return merged


def without_switched(
    book: RecipeBook, name: str, chosen: Mapping[str, str]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Apply the rule of a switched option to a recipe and those it builds on.

    Args:
        book: the recipes.
        name: the recipe of the run.
        chosen: {group: option} of the command line.

    Returns:
        {recipe name: content for Hydra}, and one sentence for each recipe and group whose values do not apply.
    """
    final = book.choices(name) | dict(chosen)
    contents: dict[str, dict[str, Any]] = {}
    notices: list[str] = []
    for recipe in book.chain(name):
        written_for = book.choices(recipe.name)
        body = dict(recipe.body)
        for group, option in final.items():
            if written_for.get(group, option) != option and group in body:
                values = body.pop(group)
                keys = (
                    [f"{group}.{key}={show(value)}" for key, value in values.items()]
                    if isinstance(values, dict)
                    else []
                )
                notices.append(
                    f"{group}={option} replaces {group}={written_for[group]} of recipe {recipe.name}, "
                    f"so its {', '.join(keys) or group} {'do' if len(keys) > 1 else 'does'} not apply"
                )
        contents[recipe.name] = {"defaults": recipe.defaults or ["_self_"], **body}
    return contents, notices
