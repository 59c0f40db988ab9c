"""Start real processes quickly: one server imports torch, and every rank is forked from it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# DTensor imports torch._dynamo at its first use, seconds in every rank unless the server has it.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch._dynamo", "torch.distributed.tensor", "moeflow.train.checkpoint"])


def start(function: Callable[..., Any], *args: Any) -> Any:
    """Return a started process that runs `function(*args)`."""
    process = _context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def start_ranks(function: Callable[..., Any], world: int, store: Path, *args: Any) -> list[tuple[Any, Any]]:
    """Start `function(rank, world, *args)` on `world` gloo ranks; return (process, connection for its result) of each."""
    ranks = []
    for rank in range(world):
        ours, theirs = _context.Pipe()
        ranks.append((start(_rank, function, rank, world, str(store), theirs, args), ours))
        theirs.close()
    return ranks


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run `function(rank, world, *args)` on `world` gloo ranks and return their results; fail after `timeout_s`."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_ranks(function, world, Path(folder) / "store", *args)
        deadline = time.monotonic() + timeout_s
        try:
            results = []
            for rank, (_, connection) in enumerate(ranks):
                assert connection.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} said nothing in time"
                good, result = connection.recv()
                assert good, f"rank {rank}:\n{result}"
                results.append(result)
            for process, _ in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
            return results
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _rank(function: Callable[..., Any], rank: int, world: int, store: str, connection: Any, args: tuple) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    try:
        reply = (True, function(rank, world, *args))
    except BaseException:
        reply = (False, traceback.format_exc())
    connection.send(reply)
    if reply[0]:
        dist.barrier()
        dist.destroy_process_group()
