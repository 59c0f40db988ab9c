"""The keys of a run, read off the schema's dataclasses: names, types, defaults, help and constraints.

Three sections have several classes, one an option of the group of the same name; their `name` key says which.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moeflow.errors import nearest
from moeflow.schema import DATASETS, GATES, MODELS, RunConfig

#: Section -> name -> class.
POLYMORPHIC: dict[str, Mapping[str, type]] = {
    "model": MODELS,
    "gate": GATES,
    "data": DATASETS,
}


@dataclasses.dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a schema class.

    Attributes:
        name: the last part of the dotted key.
        kind: the plain type: bool, int, float, str, list, dict, or a dataclass.
        element: type of the elements of a list or of the values of a dict, else None.
        optional: whether null is a value.
        default: the default value (a fresh object for lists, dicts and sections).
        metadata: help and constraints, see `moeflow.schema.fields.option`.
    """

    name: str
    kind: type
    element: type | None
    optional: bool
    default: Any
    metadata: Mapping[str, Any]

    @property
    def is_section(self) -> bool:
        """Whether the field holds keys of its own."""
        return dataclasses.is_dataclass(self.kind)

    @property
    def help(self) -> str:
        return self.metadata.get("help", "")

    @property
    def choices(self) -> tuple[Any, ...]:
        return self.metadata.get("choices", ())


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A dotted key that can be overridden, with the field it names."""

    name: str
    field: FieldInfo


@functools.cache
def fields_of(cls: type) -> Mapping[str, FieldInfo]:
    """Return the fields of a schema class by name, their types resolved."""
    hints = typing.get_type_hints(cls)
    return types.MappingProxyType({f.name: _field_info(f, hints[f.name]) for f in dataclasses.fields(cls)})


def _field_info(field: dataclasses.Field, hint: Any) -> FieldInfo:
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        assert len(inner) == 1, f"{field.name}: a schema type is X or Optional[X]"
        optional, hint = True, inner[0]
    kind, element = typing.get_origin(hint) or hint, None
    if kind in (list, dict):
        element = typing.get_args(hint)[-1]
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return FieldInfo(field.name, kind, element, optional, default, field.metadata)


def section_class(section: str, name: Any) -> type | None:
    """Return the class of a polymorphic section by its `name`, or None when there is no such class."""
    return POLYMORPHIC[section].get(name) if isinstance(name, str) else None


def default_classes() -> dict[str, type]:
    """Return the base class of each polymorphic section: the keys that every option has."""
    return {section: fields_of(RunConfig)[section].kind for section in POLYMORPHIC}


def iter_keys(classes: Mapping[str, type] | None = None, cls: type = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Yield every dotted key in the schema's order.

    Args:
        classes: class of each polymorphic section; the base classes where None.
        cls: schema class to start from.
        prefix: what stands before the first dot.
    """
    classes = default_classes() if classes is None else classes
    for field in fields_of(cls).values():
        name = f"{prefix}{field.name}"
        if field.is_section:
            yield from iter_keys(classes, classes.get(name, field.kind), f"{name}.")
        else:
            yield Key(name, field)


def all_key_names() -> list[str]:
    """Return every dotted key that any choice of options can have."""
    names = dict.fromkeys(key.name for key in iter_keys())
    for section, options in POLYMORPHIC.items():
        for cls in options.values():
            names.update(dict.fromkeys(key.name for key in iter_keys(cls=cls, prefix=f"{section}.")))
    return list(names)


def nearest_key(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid dotted key that a misspelt one most likely meant, or None.

    In this order: a near spelling in the same section, the right last part under another section (`batch_size` for
    `data.batch_size`), a near spelling of the whole, a near spelling of the last part under another section.
    """
    keys = list(dict.fromkeys(valid))
    section, _, leaf = name.rpartition(".")
    same_section = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    if close := nearest(leaf, same_section):
        return same_section[close]
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    if len(same_leaf) == 1:
        return same_leaf[0]
    if whole := difflib.get_close_matches(name, same_leaf or keys, n=1, cutoff=0.8):
        return whole[0]
    leaves = {key.rpartition(".")[2]: key for key in keys}
    near_leaf = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    return leaves[near_leaf[0]] if near_leaf else None
