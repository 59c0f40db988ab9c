"""One helper: a dataclass field with a default and a line of help."""

from __future__ import annotations

import dataclasses
from typing import Any


def option(default: Any, help: str, **constraints: Any) -> Any:
    """Return a dataclass field.

    Args:
        default: the default value; lists and dicts are copied for each instance.
        help: one line that `moeflow train --help` and the documentation print for the key.
        constraints: `minimum`, `maximum` (inclusive bounds), `above`, `below` (exclusive bounds), `choices` or `length`
            (of a list; the other constraints then hold for its elements), all checked by `moeflow.config.validate`;
            `path` marks a file or folder name that is made absolute in the frozen configuration, and
            `path_under="root"` one that is relative to the key `root` beside it where that is given.
    """
    metadata = {"help": help, **constraints}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
