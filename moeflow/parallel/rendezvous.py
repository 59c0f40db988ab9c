"""Meeting of the ranks that a launcher started, before there is a process group.

Rank 0 composes the configuration and makes the run folder; the others learn its path, or the error, through the store
that the launcher prepared.  Only then is the process group made, with what the configuration says.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from moeflow.errors import LaunchError, MoeflowError
from moeflow.parallel.environment import Launched, export

_KEY = "moeflow/run_dir"


def agree(launched: Launched, decide: Callable[[], str], timeout_s: float = 300.0) -> str:
    """Run `decide` on rank 0 and return its text on every rank.

    Args:
        launched: what the launcher left.
        decide: may raise MoeflowError, which then is raised on every rank.
        timeout_s: seconds to wait for rank 0.

    Raises:
        LaunchError: the ranks do not meet.
    """
    export(launched)
    if launched.world == 1:
        return decide()
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _store(launched.rank, launched.world, timeout)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {launched.rank} does not reach rank 0: {error}", "check MASTER_ADDR and MASTER_PORT"
        ) from error
    if launched.rank == 0:
        try:
            reply: str | MoeflowError = decide()
        except MoeflowError as error:
            reply = error
        store.set(_KEY, pickle.dumps(reply))  # type: ignore[arg-type]  # bytes are taken
    else:
        try:
            store.wait([_KEY], timeout)
        except RuntimeError as error:
            raise LaunchError(
                f"rank 0 did not say where the run is within {timeout_s:.0f} s", "see its output"
            ) from error
        reply = pickle.loads(store.get(_KEY))
    # The last one to read lets rank 0 go on, which may otherwise end, and the store with it.
    store.add(_KEY + "/read", 1)
    if launched.rank == 0:
        _wait_for_readers(store, launched.world, timeout_s)
    if isinstance(reply, MoeflowError):
        raise reply
    return reply


def restarts() -> int:
    """How often torchrun has started the ranks anew (its --max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def rejoin(backend: str, timeout: timedelta) -> None:
    """After a restart by torchrun, make the process group under names of its own; otherwise do nothing.

    The agent's store outlives the ranks, so that those that start anew would find the addresses of the dead ones.
    """
    world = int(os.environ.get("WORLD_SIZE", 1))
    if restarts() == 0 or world == 1 or dist.is_initialized():
        return
    rank = int(os.environ["RANK"])
    dist.init_process_group(backend, store=_store(rank, world, timeout), rank=rank, world_size=world, timeout=timeout)


def _store(rank: int, world: int, timeout: timedelta) -> dist.Store:
    store, _, _ = next(iter(dist.rendezvous("env://", rank, world, timeout=timeout)))
    return dist.PrefixStore(f"restart{restarts()}", store) if restarts() else store


def _wait_for_readers(store: dist.Store, world: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while store.add(_KEY + "/read", 0) < world:
        if time.monotonic() > deadline:
            raise LaunchError(
                f"not all of {world} ranks came to read the run folder within {timeout_s:.0f} s", "see their output"
            )
        time.sleep(0.01)
