"""The long help: groups with their options, recipes, and every key with its default, read off the files and the schema.

Hydra is not imported: it alone would take half of the time that help may take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from moeflow.config.build import show
from moeflow.config.keys import POLYMORPHIC, FieldInfo, Key, default_classes, fields_of, iter_keys
from moeflow.config.options import EXTRA_GROUPS, default_choices, group_names, options


def groups_text(config_dirs: Sequence[Path] = ()) -> str:
    """Return the groups and their options, the default one marked."""
    chosen = default_choices()
    lines = ["groups (GROUP=OPTION; * is the default):"]
    for group in group_names():
        if group == "recipe":
            continue
        names = [f"{name}*" if chosen.get(group) == name else name for name in options(group, config_dirs)]
        sign = "+" if group in EXTRA_GROUPS else ""
        lines.append(f"  {sign + group:<10} {' '.join(names)}")
    return "\n".join(lines)


def recipes_text(config_dirs: Sequence[Path] = ()) -> str:
    """Return the recipes with their summaries."""
    found = options("recipe", config_dirs)
    width = max(map(len, found), default=0)
    lines = [f"  {name:<{width}}  {option.summary}".rstrip() for name, option in found.items()]
    return "\n".join(["recipes (+recipe=NAME):", *(lines or ["  (none found)"])])


def keys_text() -> str:
    """Return every key with its default and help, section by section."""
    lines = ["keys (KEY=VALUE):"]
    bases = default_classes()
    for section in _sections():
        classes = {name: bases.get(name, type(None)) for name in bases}
        rows = [key for key in iter_keys(classes) if key.name.partition(".")[0] == section]
        lines.append("")
        lines += [_row(key) for key in rows]
        for option, cls in POLYMORPHIC.get(section, {}).items():
            own = [Key(f"{section}.{field.name}", field) for field in _own_fields(cls, bases[section])]
            if own:
                lines += [f"  with {section}={option}:", *(_row(key, indent=4) for key in own)]
    return "\n".join(lines)


def _sections() -> Iterator[str]:
    yield from dict.fromkeys(key.name.partition(".")[0] for key in iter_keys())


def _own_fields(cls: type, base: type) -> list[FieldInfo]:
    """Return the fields that an option adds to its base class, and those whose default it changes."""
    common = fields_of(base)
    fields = [field for name, field in fields_of(cls).items() if name != "name"]
    return [field for field in fields if field.name not in common or field.default != common[field.name].default]


def _row(key: Key, indent: int = 2) -> str:
    left = f"{' ' * indent}{key.name}={show(key.field.default)}"
    choices = f" [{'|'.join(map(str, key.field.choices))}]" if key.field.choices else ""
    return f"{left:<38} {key.field.help}{choices}"
