"""Plain dicts and lists (what YAML holds) -> the schema's dataclasses, and back.

Every key is walked against the fields of its class, so an unknown one never survives, wherever it came from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from moeflow.config.keys import (
    POLYMORPHIC,
    FieldInfo,
    all_key_names,
    fields_of,
    iter_keys,
    nearest_key,
    section_class,
)
from moeflow.config.problems import Problem
from moeflow.errors import did_you_mean
from moeflow.schema import RunConfig

_NOUNS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a table",
}
_EXAMPLES = {
    bool: "true",
    int: "1",
    float: "0.1",
    str: "text",
    list: "[...]",
    dict: "{...}",
}
_BAD = object()


def build(data: Any, problems: list[Problem], where: str = "", classes: Mapping[str, type] | None = None) -> RunConfig:
    """Return the RunConfig that `data` states; keys it does not state keep their defaults.

    Args:
        data: nested dicts and lists, as a YAML file holds them.
        problems: receives one entry for each unknown key, wrong type or unknown option; the result may be used only
            if nothing was added.
        where: file that the data came from; begins each message when given.
        classes: class of each polymorphic section; chosen by the section's `name` where None.
    """
    return _Builder(problems, f"{where}: " if where else "", classes).section(RunConfig, data, "")


def check_partial(
    data: Any,
    classes: Mapping[str, type],
    problems: list[Problem],
    where: str = "",
    path: str = "",
) -> None:
    """Add the problems of a file that states some of the keys, such as a recipe.

    Args:
        data: content of the file.
        classes: class of each polymorphic section in the run.
        problems: receives the problems.
        where: the file; begins each message when given.
        path: section that the content belongs to ("" for the whole run).
    """
    builder = _Builder(problems, f"{where}: " if where else "", classes)
    cls: type = RunConfig
    for part in filter(None, path.split(".")):
        cls = classes.get(path, fields_of(cls)[part].kind)
    builder.section(cls, data, path)


def to_dict(config: Any) -> dict[str, Any]:
    """Return the nested plain dict of a configuration."""
    return dataclasses.asdict(config)


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return {dotted key: value} of every key."""
    classes = {section: type(getattr(config, section)) for section in POLYMORPHIC}
    return {key.name: get_key(config, key.name) for key in iter_keys(classes)}


def get_key(config: Any, name: str) -> Any:
    """Return the value of a dotted key, which must exist."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


class _Builder:
    """One walk over the data: `prefix` begins every message, `classes` fixes polymorphic sections."""

    def __init__(
        self,
        problems: list[Problem],
        prefix: str,
        classes: Mapping[str, type] | None = None,
    ):
        self.problems = problems
        self.prefix = prefix
        self.classes = classes or {}

    def add(self, what: str, mend: str | None = None) -> None:
        self.problems.append(Problem(f"{self.prefix}{what}", mend))

    def section(self, cls: type, data: Any, path: str) -> Any:
        if not isinstance(data, Mapping):
            self.add(f"{path or 'the configuration'} holds keys of its own; {show(data)} is not a table of keys.")
            return cls()
        if path in self.classes:
            cls = self.classes[path]
        elif path in POLYMORPHIC:
            cls = self._choose(path, data, cls)
        fields = fields_of(cls)
        values = {}
        for key, value in data.items():
            name = f"{path}.{key}" if path else str(key)
            if key not in fields:
                self._unknown(name, value, cls, path)
            elif (converted := self._value(fields[key], value, name)) is not _BAD:
                values[key] = converted
        return cls(**values)

    def _choose(self, path: str, data: Mapping, base: type) -> type:
        name = data.get("name", fields_of(base)["name"].default)
        chosen = section_class(path, name)
        if chosen is None:
            options = ", ".join(POLYMORPHIC[path])
            hint = did_you_mean(str(name), POLYMORPHIC[path])
            self.add(
                f"{path}.name={name} is not an option of {path}.{hint}",
                f"{path}=NAME with one of {options}",
            )
            return base
        return chosen

    def _unknown(self, name: str, value: Any, cls: type, path: str) -> None:
        leaf = name.rpartition(".")[2]
        owners = [option for option, owner in POLYMORPHIC.get(path, {}).items() if leaf in fields_of(owner)]
        if owners:
            self.add(
                f"'{name}' is a key of {path}={' and '.join(owners)}, not of the {path} that was chosen.",
                f"{path}={owners[0]} {name}={show(value)}, or leave {name} out",
            )
            return
        while isinstance(value, Mapping) and len(value) == 1:
            ((inner, value),) = value.items()
            name = f"{name}.{inner}"
        siblings = [f"{path}.{field}" if path else field for field in fields_of(cls)]
        close = nearest_key(name, [*siblings, *all_key_names()])
        hint = f" Did you mean '{close}'?" if close else ""
        mend = f"{close}={show(value)}" if close and not isinstance(value, Mapping) else None
        self.add(f"unknown key '{name}'.{hint}", mend or "moeflow train --help lists every key")

    def _value(self, field: FieldInfo, value: Any, name: str) -> Any:
        if field.is_section:
            return self.section(field.kind, value, name)
        if value is None:
            if field.optional:
                return None
            self.add(
                f"{name} cannot be null; it is {_NOUNS[field.kind]}.",
                f"{name}={_example(field)}",
            )
            return _BAD
        converted = _convert(field.kind, field.element, value)
        if converted is _BAD:
            self.add(f"{name}={show(value)}: {_rule(field, value)}.", f"{name}={_example(field)}")
        return converted


def _convert(kind: type, element: type | None, value: Any) -> Any:
    """Return `value` as `kind` where nothing is lost by it, else _BAD."""
    if kind is list and isinstance(value, (list, tuple)):
        items = [_convert(element, None, item) for item in value]  # type: ignore[arg-type]
        return _BAD if any(item is _BAD for item in items) else items
    if kind is dict and isinstance(value, Mapping):
        table = {str(key): _convert(element, None, item) for key, item in value.items()}  # type: ignore[arg-type]
        return _BAD if any(item is _BAD for item in table.values()) else table
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        # A float is what every later consumer can read back from YAML and JSON: finite.
        try:
            return float(value) if math.isfinite(value) else _BAD
        except OverflowError:
            return _BAD
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if kind is Any or (type(value) is kind and value != "???"):
        return value
    return _BAD


def _rule(field: FieldInfo, value: Any) -> str:
    noun = "a finite number" if isinstance(value, float) and field.kind is float else _NOUNS[field.kind]
    if field.element is not None:
        noun += f" whose elements are each {_NOUNS[field.element]}"
    return f"the value must be {noun}{' or null' if field.optional else ''}"


def _example(field: FieldInfo) -> str:
    if field.choices and field.kind is not list:
        return "|".join(map(str, field.choices))
    return show(field.default) if field.default is not None else _EXAMPLES[field.kind]


def show(value: Any) -> str:
    """Return the value as one would write it in an override, cut to a readable length."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        text = "[" + ",".join(map(show, value)) + "]"
    elif isinstance(value, Mapping):
        text = "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"
    else:
        text = str(value)
    text = text.replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."
