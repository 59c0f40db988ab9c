"""Processes that start in milliseconds, for tests that kill many of them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def start(function: Callable[..., Any], *args: Any) -> Any:
    """A started process that runs `function(*args)`, forked from the server that `run_ranks` uses."""
    context = multiprocessing.get_context("forkserver")
    # The same as in tests/distributed.py: the first to start the server decides.
    context.set_forkserver_preload(["pytest", "torch.distributed", "torch.distributed.tensor", "torch._dynamo"])
    process = context.Process(target=function, args=args, daemon=True)
    process.start()
    return process
