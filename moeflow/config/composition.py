"""The only door to Hydra: words of the command line -> one typed, checked configuration.

Order of composition: the schema, one option of each group (primary defaults, then the recipe's choices, then those of
the command line), the values of the recipe, the values of the debug option, the values on the command line.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moeflow.config.build import build, check_partial
from moeflow.config.folders import locate
from moeflow.config.keys import POLYMORPHIC, all_key_names, default_classes, section_class
from moeflow.config.options import (
    EXTRA_GROUPS,
    PRIMARY,
    Option,
    check_config_dirs,
    default_choices,
    group_names,
    options,
)
from moeflow.config.overrides import Request, ValueOverride, read_request
from moeflow.config.plain import parse_yaml, read_text
from moeflow.config.problems import Problem, error_of, raise_any
from moeflow.config.recipes import Recipe, RecipeBook, without_switched
from moeflow.config.rules import check_bounds, check_rules
from moeflow.errors import ConfigError
from moeflow.schema import RunConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Composition:
    """A composed and checked run.

    Attributes:
        config: the typed configuration.
        node: what Hydra composed, interpolations unresolved.
        recipe: name of the recipe, if any.
        overrides: the words that it was composed from.
        config_dirs: the user's folders.
        notices: sentences the user should see, such as values of a recipe that do not apply.
    """

    config: RunConfig
    node: DictConfig
    recipe: str | None
    overrides: tuple[str, ...]
    config_dirs: tuple[Path, ...]
    notices: tuple[str, ...]

    def yaml(self, resolve: bool = False) -> str:
        """Return the composed configuration as YAML."""
        return OmegaConf.to_yaml(self.node, resolve=resolve)


def compose(
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    world: int | None = None,
) -> RunConfig:
    """Compose and check a configuration.

    Args:
        overrides: words as on the command line, for example `["+recipe=cifar_moe", "gate=switch", "optim.lr=3e-4"]`.
        config_dirs: the user's folders with GROUP/NAME.yaml.
        world: number of processes where a launcher has fixed it.

    Raises:
        ConfigError: lists every problem found.
    """
    return compose_run(overrides, config_dirs, world).config


def compose_run(
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    world: int | None = None,
    rules: bool = True,
) -> Composition:
    """Do what `compose` does, and tell how it came about; `rules=False` leaves out the rules between keys."""
    folders = [Path(folder) for folder in config_dirs]
    check_config_dirs(folders)
    request = read_request(list(overrides), folders)
    if request.problems:
        # Which options are meant is not certain now: look for keys that no option has, and stop.
        raise error_of([*request.problems, *_unknown_everywhere(request.values)])
    composer = _Composer(request, folders)
    node, problems = composer.compose()
    # The classes are those that Hydra composed: a `name` that was overridden by hand must not change them.
    config = build(_to_container(node), problems, classes=_classes_of(node))
    between = check_rules(config, world) if rules and not problems else ()
    raise_any([*problems, *check_bounds(config), *between])
    if request.recipe is not None:
        config.run.recipe = node.run.recipe = request.recipe
    return Composition(config, node, request.recipe, tuple(overrides), tuple(folders), tuple(composer.notices))


class _Composer:
    """One composition: what Hydra is given, and the search for the reason when it refuses."""

    def __init__(self, request: Request, config_dirs: Sequence[Path]):
        self.request = request
        self.config_dirs = config_dirs
        self.notices: list[str] = []
        self.recipes: dict[str, dict[str, Any]] = {}
        self.chain: list[Recipe] = []
        self.final = dict(default_choices())
        if request.recipe is not None:
            book = RecipeBook(config_dirs)
            self.chain = book.chain(request.recipe)
            self.recipes, self.notices = without_switched(book, request.recipe, request.groups)
            self.final = book.choices(request.recipe)
        self.final |= request.groups
        self.user_files = _read_user_files(config_dirs)

    def compose(self) -> tuple[DictConfig, list[Problem]]:
        """Return Hydra's configuration, and the problems of the overrides that had to be left out of it."""
        try:
            return self._hydra(self.request.hydra_overrides()), []
        except _Refused as refusal:
            classes = self._classes()
            in_files = self._problems_in_files(classes)
            good, in_values = self._sort_values(classes)
            if in_files or not in_values:
                raise error_of([*in_files, *in_values] or [refusal.problem]) from refusal
            # The rest is composed and checked too, so that everything is reported at once.
            return self._hydra(self.request.hydra_overrides(good)), in_values

    def _hydra(self, words: list[str]) -> DictConfig:
        folder = str(locate("configs"))
        try:
            with (
                _registered(self.final, self.recipes, self.user_files),
                _fresh_global_hydra(),
                initialize_config_dir(folder, version_base="1.3", job_name="moeflow"),
            ):
                return hydra_compose(PRIMARY, overrides=words)
        except Exception as error:  # Hydra and OmegaConf also raise built-in exceptions on odd input of a user
            raise _Refused(error) from error

    def _classes(self) -> dict[str, type]:
        """Return the class of each polymorphic section, followed through the defaults lists of its option's files."""
        return {section: self._class_of(section, self.final[section]) for section in POLYMORPHIC}

    def _class_of(self, section: str, name: str) -> type:
        found = options(section, self.config_dirs)
        seen: set[str] = set()
        while name in found and name not in seen:
            seen.add(name)
            content = parse_yaml(read_text(found[name].path, section), str(found[name].path))
            defaults = content.get("defaults", []) if isinstance(content, dict) else []
            bases = [item.partition("@")[0].rpartition("/")[2] for item in defaults if isinstance(item, str)]
            name = next((base for base in bases if base != "_self_"), name)
        return section_class(section, name) or default_classes()[section]

    def _problems_in_files(self, classes: dict[str, type]) -> list[Problem]:
        problems: list[Problem] = []
        for recipe in self.chain:
            body = {key: value for key, value in self.recipes[recipe.name].items() if key != "defaults"}
            check_partial(body, classes, problems, recipe.where)
        for file in self.user_files:
            if self.final.get(file.option.group) == file.option.name:
                path = "" if file.option.group in EXTRA_GROUPS else file.option.group
                body = {key: value for key, value in file.content.items() if key != "defaults"}
                check_partial(body, classes, problems, str(file.option.path), path)
        return problems

    def _sort_values(self, classes: dict[str, type]) -> tuple[list[ValueOverride], list[Problem]]:
        good, problems = [], []
        for value in self.request.values:
            found: list[Problem] = []
            check_partial(value.as_tree(), classes, found)
            problems += found
            good += [] if found else [value]
        return good, problems


class _Refused(Exception):
    """Hydra did not compose; `problem` is the short form of what it said."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        lines = [line.strip() for line in f"{error}\n{error.__cause__ or ''}".splitlines()]
        noise = (
            "reference_type",
            "object_type",
            "See https",
            "To append",
            "Config search path",
            "provider=",
            "None",
        )
        told = [line for line in lines if line and not line.startswith(noise)]
        self.problem = Problem(f"the configuration does not compose: {'; '.join(told[:4])}")


@dataclasses.dataclass(frozen=True, slots=True)
class _UserFile:
    """An option that is the user's own, other than a recipe."""

    option: Option
    content: dict[str, Any]
    package: str


def _read_user_files(config_dirs: Sequence[Path]) -> list[_UserFile]:
    files = []
    for group in group_names() if config_dirs else ():
        own = options(group)
        for option in options(group, config_dirs).values():
            if group == "recipe" or option.name in own:
                continue
            text = read_text(option.path, group)
            content = parse_yaml(text, str(option.path)) or {}
            if not isinstance(content, dict):
                raise ConfigError(
                    f"{option.path} is not a table of keys.",
                    "write it as KEY: VALUE lines",
                )
            header = re.search(r"^#\s*@package\s+(\S+)", text, re.MULTILINE)
            package = "_global_" if group in EXTRA_GROUPS else header.group(1) if header else group
            files.append(_UserFile(option, content, package.replace("_group_", group)))
    return files


@contextmanager
def _registered(
    chosen: dict[str, str], recipes: dict[str, dict[str, Any]], user_files: Sequence[_UserFile]
) -> Iterator[None]:
    """Put the schema, the recipes and the user's options into Hydra's ConfigStore for one composition.

    An option that has the name of a class is made of that class; only an option of another name (a variant, built on
    some class) needs all of them.
    """
    store = ConfigStore.instance()
    before = dict(store.repo)
    for group in ("schema", *group_names()):
        store.repo.pop(group, None)
    try:
        store.store(
            group="schema",
            name="run",
            node=RunConfig,
            package="_global_",
            provider="moeflow",
        )
        for section, classes in POLYMORPHIC.items():
            only = chosen[section]
            for name, cls in {only: classes[only]}.items() if only in classes else classes.items():
                store.store(group=f"schema/{section}", name=name, node=cls, provider="moeflow")
        for name, content in recipes.items():
            store.store(
                group="recipe",
                name=name,
                node=content,
                package="_global_",
                provider="recipe",
            )
        for file in user_files:
            store.store(
                group=file.option.group,
                name=file.option.name,
                node=file.content,
                package=file.package,
            )
        yield
    finally:
        store.repo.clear()
        store.repo.update(before)


@contextmanager
def _fresh_global_hydra() -> Iterator[None]:
    """Hide a Hydra that the calling program may have initialized for itself."""
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        yield
    finally:
        # Hydra's own clean-up has put another instance in place.
        GlobalHydra.instance().hydra = outer


def _unknown_everywhere(values: Sequence[ValueOverride]) -> list[Problem]:
    known = all_key_names()
    problems: list[Problem] = []
    for value in values:
        inside = [key for key in known if key == value.key or key.startswith(f"{value.key}.")]
        if not inside:
            check_partial(value.as_tree(), {}, problems)
    return problems


def _classes_of(node: DictConfig) -> dict[str, type]:
    return {section: OmegaConf.get_type(node[section]) for section in POLYMORPHIC}  # type: ignore[misc]


def _to_container(node: DictConfig) -> Any:
    try:
        return OmegaConf.to_container(node, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None)
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{key or 'an interpolation'}: ${{...}} cannot be resolved: {told}.",
            "write the value itself",
        ) from error
