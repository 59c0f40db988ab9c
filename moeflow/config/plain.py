"""YAML files without Hydra: reading with messages that name the file and line, and the frozen file of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from moeflow.config.build import build, to_dict
from moeflow.config.problems import Problem, raise_any
from moeflow.errors import ConfigError
from moeflow.schema import RunConfig

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """Safe YAML in which 1e-3 is a number (YAML 1.1 wants 1.0e-3) and a key may stand only once in a table."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "found a key that is no text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key}' stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_FLOAT = (
    r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Dumper(yaml.SafeDumper):
    """The writer that quotes the texts which `_Loader` would take for numbers."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))


def parse_yaml(text: str, where: str) -> Any:
    """Return the content of a YAML text.

    Args:
        text: the document.
        where: the file it came from, for the message.

    Raises:
        ConfigError: the text is no YAML; the message names the line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{where}{place}: not valid YAML: {error.problem}.",
            "correct the file at that place",
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: not valid YAML: {str(error).splitlines()[0]}.",
            "correct the file",
        ) from error


def read_text(path: Path, what: str) -> str:
    """Return the text of a file.

    Args:
        path: the file.
        what: what the file is, for the message, for example "recipe".

    Raises:
        ConfigError: it is missing, unreadable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{what} {path} does not exist.", "check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{what} {path} is not UTF-8 text (byte {error.start}).",
            "save the file as UTF-8",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{what} {path} cannot be read: {error.strerror}.",
            f"check it with: ls -ld '{path}'",
        ) from error


def load(path: str | os.PathLike[str]) -> RunConfig:
    """Read a frozen configuration.

    Args:
        path: YAML file written by `save`; keys it lacks keep their defaults.

    Raises:
        ConfigError: the file is missing, unreadable, or has unknown keys or wrong types (all of them are listed).
    """
    path = Path(path)
    data = parse_yaml(read_text(path, "configuration file"), str(path))
    if data is None:
        raise ConfigError(
            f"configuration file {path} is empty.",
            "restore it from a copy (config.N.yaml beside it, if any)",
        )
    problems: list[Problem] = []
    config = build(data, problems, where=str(path))
    raise_any(problems)
    return config


def dump(config: RunConfig) -> str:
    """Return the YAML text of a configuration, keys in the schema's order."""
    data = to_dict(config)
    text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    # These are line breaks to YAML's readers, but PyYAML writes them as they are.
    if any(char in text for char in "\x85\u2028\u2029"):
        text = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)
    return text


def save(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write a configuration so that `load` gives an equal one; a crash leaves the old file or the new one.

    Raises:
        OSError: the file cannot be written; nothing is changed then.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "w", encoding="utf-8") as stream:
            stream.write(dump(config))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
