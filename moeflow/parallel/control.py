"""The group for control talk: small Python objects among all ranks on the CPU, off the path of a training step."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from moeflow.parallel.topology import Group


def control_group(process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 1800.0) -> Group:
    """Return a gloo group of all ranks; every rank calls this at the same place.

    A group of its own, so that a background thread may use it while training's collectives run.

    Args:
        process_group: a group with a CPU backend to take instead of a new one.
        timeout_s: seconds a rank waits for the others; as long as the slowest may take to write its share.
    """
    if process_group is None and (not dist.is_initialized() or dist.get_world_size() == 1):
        return Group("control", (0,), 0)
    made = process_group or dist.new_group(
        backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="moeflow_control"
    )
    return Group("control", tuple(dist.get_process_group_ranks(made)), dist.get_rank(made), made)
