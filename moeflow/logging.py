"""Rank-aware logging: rank 0 speaks, the others only warn, each line of theirs marked with the rank.

Nothing here runs at import, and the root logger is left alone: a script that uses moeflow as a library keeps its own
logging.
"""

from __future__ import annotations

import logging
import os
import sys

ROOT = "moeflow"


def get_logger(name: str) -> logging.Logger:
    """Return the module logger; pass `__name__`."""
    return logging.getLogger(name)


def rank() -> int:
    """Rank of this process as the launcher's variables state it (0 when started alone)."""
    for key in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"):
        if key in os.environ:
            return int(os.environ[key])
    return 0


def setup(verbosity: int = 0) -> None:
    """Send moeflow's log to stderr.

    Args:
        verbosity: -1 warnings only, 0 information, 1 debugging.  Ranks other than 0 never go below warnings unless
            debugging was asked for.
    """
    logger = logging.getLogger(ROOT)
    level = {-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG)
    this_rank = rank()
    if this_rank != 0 and level == logging.INFO:
        level = logging.WARNING
    prefix = f"[rank {this_rank}] " if this_rank != 0 or verbosity > 0 else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
