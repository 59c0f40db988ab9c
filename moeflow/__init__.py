"""moeflow: training of Mixture-of-Experts models, correct on any parallel layout.

`import moeflow` loads nothing else: the public names below bring torch with them when they are first used, so that the
command line answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeflow.models.moefy import moefy
    from moeflow.moe import MoELayer

__version__ = "0.1.0"

__all__ = ["MoELayer", "__version__", "moefy"]

_LAZY = {"MoELayer": "moeflow.moe", "moefy": "moeflow.models.moefy"}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module 'moeflow' has no attribute '{name}'")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
