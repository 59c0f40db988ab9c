"""Where the data folders are: `configs` and `recipes` (and `kernels`), installed or in a checkout."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import moeflow
from moeflow.errors import ConfigError


@functools.cache
def locate(folder: str) -> Path:
    """Return the absolute path of a data folder.

    A wheel holds them as the packages `moeflow.configs`, `moeflow.recipes` and `moeflow.kernels`; an editable install
    maps those names to the checkout; and a checkout that was never installed has them beside the package.

    Args:
        folder: "configs", "recipes" or "kernels".

    Raises:
        ConfigError: the folder is in none of these places.
    """
    package = Path(moeflow.__file__).resolve().parent
    # The checkout before import hooks: an editable install of another checkout must not answer for these sources.
    candidates = [package / folder]
    if (package.parent / "pyproject.toml").is_file():
        candidates.append(package.parent / folder)
    candidates += _mapped(folder)
    for candidate in candidates:
        if (candidate / "__init__.py").is_file():
            return candidate
    tried = ", ".join(map(str, candidates))
    raise ConfigError(
        f"moeflow's folder '{folder}' is missing (looked in {tried}).",
        "pip install --force-reinstall moeflow",
    )


def _mapped(folder: str) -> list[Path]:
    """Return where the import system says that `moeflow.<folder>` is."""
    spec = importlib.util.find_spec(f"moeflow.{folder}")
    return [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
