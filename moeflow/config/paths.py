"""File and folder names of a configuration, made absolute: a run goes on from whatever folder it is resumed in."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeflow.config.build import get_key
from moeflow.config.keys import POLYMORPHIC, iter_keys
from moeflow.schema import RunConfig
from moeflow.schema.engines import read_ds_config


def absolute_paths(config: RunConfig, folder: str | os.PathLike[str] | None = None) -> RunConfig:
    """Return a copy whose path keys are absolute, and that holds the text of the files that it needs whole.

    Args:
        config: the configuration; keys marked `path` in the schema are relative to `folder`, those marked
            `path_under="KEY"` to their neighbour KEY where that is given.
        folder: the current one where None.
    """
    base = Path.cwd() if folder is None else Path(folder)
    result = copy.deepcopy(config)
    classes = {section: type(getattr(config, section)) for section in POLYMORPHIC}
    for key in iter_keys(classes):
        value = get_key(result, key.name)
        metadata: Mapping[str, Any] = key.field.metadata
        if not isinstance(value, str) or not ("path" in metadata or "path_under" in metadata):
            continue
        section_name, _, leaf = key.name.rpartition(".")
        section = get_key(result, section_name)
        if getattr(section, metadata.get("path_under", ""), None) is None:
            setattr(section, leaf, os.path.normpath(base / Path(value).expanduser()))
    if result.parallel.ds_config is not None:
        # A run needs nothing but its folder, and goes on with what it began with.
        given = result.parallel.ds_config
        named = given if given.lstrip().startswith("{") else os.fspath(base / Path(given).expanduser())
        result.parallel.ds_config = json.dumps(read_ds_config(named))
    return result
