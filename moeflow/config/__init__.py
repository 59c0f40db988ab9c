"""Configuration of a run: composition through Hydra, checks, and the frozen file.

    compose(overrides)      words of the command line -> RunConfig (the only thing here that needs Hydra)
    load(path), save(...)   frozen config.yaml <-> RunConfig
    amend(config, words)    overrides applied to a frozen configuration
    validate(config)        bounds, choices, and a layout that divides

Names are imported when first used: ranks and the planner read the frozen file without paying for Hydra.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeflow.config.changes import amend
    from moeflow.config.composition import Composition, compose, compose_run
    from moeflow.config.folders import locate
    from moeflow.config.paths import absolute_paths
    from moeflow.config.plain import load, save
    from moeflow.config.rules import validate

__all__ = ["Composition", "absolute_paths", "amend", "compose", "compose_run", "load", "locate", "save", "validate"]

_HOMES = {
    "Composition": "composition",
    "absolute_paths": "paths",
    "amend": "changes",
    "compose": "composition",
    "compose_run": "composition",
    "load": "plain",
    "locate": "folders",
    "save": "plain",
    "validate": "rules",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'moeflow.config' has no attribute '{name}'")
    return getattr(importlib.import_module(f"moeflow.config.{_HOMES[name]}"), name)
