"""Control talk among the ranks: small Python objects over a CPU group, never tensors, never on the step's path."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def control_group(timeout_s: float = 1800.0) -> dist.ProcessGroup | None:
    """Return a new gloo group of all ranks for control talk, or None where there is one process.

    A group of its own, so that a background thread may use it while training's collectives run.  Every rank has to
    call this at the same place.

    Args:
        timeout_s: seconds a rank waits for the others; as long as the slowest rank may take to write its share.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


def gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return every rank's `value` in rank order, on every rank ([value] without a group)."""
    if group is None:
        return [value]
    replies: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(replies, value, group=group)
    return replies  # type: ignore[return-value]
