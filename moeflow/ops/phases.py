"""Named ranges of a step for the profiler: which part of the layer, the exchange or the update the time goes to.

    with phase("gate"):
        ...

Without a profiler a mark is one look at a flag.  Compiled graphs have none: there the operators' own names tell.
The innermost range counts, and the backward pass of an operation counts for the range that its forward pass was in.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

#: What the names of ranges begin with in a trace.
PREFIX = "moeflow/"

#: What the rest of the network is called, its loss with it.
REST = "rest of the model"
#: Ranges of a step, in the order in which tables show them.
PHASES = (
    "data",
    REST,
    "gate",
    "plan",
    "dispatch",
    "all-to-all",
    "experts",
    "combine",
    "shared experts",
    "tensor parallel",
    "pipeline",
    "gradient sync",
    "optimizer",
)

#: Surrounds the backward pass, whose operations belong to the phases of their forward passes.
BACKWARD = "backward"
#: The whole of a step.
STEP = PREFIX + "step"

_OFF = contextlib.nullcontext()
_on = False


def phase(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that marks what happens in it as a part of one of `PHASES`, or as `BACKWARD`."""
    if not _on or torch.compiler.is_compiling():
        return _OFF
    assert name in PHASES or name == BACKWARD, name
    return torch.profiler.record_function(PREFIX + name)


def in_phase(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: what happens in it is a part of one of `PHASES`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def marked_function(*args: P.args, **kwargs: P.kwargs) -> R:
            with phase(name):
                return function(*args, **kwargs)

        return marked_function

    return decorate


@contextlib.contextmanager
def marks() -> Iterator[None]:
    """Turn the marks on in this process for the time of a `with` block."""
    global _on
    before, _on = _on, True
    try:
        yield
    finally:
        _on = before
