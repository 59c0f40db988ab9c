"""Ranks that hold the same parameters agree on their shapes before anything of these shapes is exchanged.

Backends answer tensors of different shapes in their own ways: gloo ends the process, NCCL waits.  So the question is
asked once, at the start, when the answer still is a message.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from moeflow.errors import CollectiveError
from moeflow.parallel.collectives import gather_objects
from moeflow.parallel.topology import Group


def agree_on_shapes(shapes: Mapping[str, Sequence[int]], group: Group) -> None:
    """Make sure that all ranks of a group have parameters of the same names and shapes.

    Args:
        shapes: by the parameter's name, as a process alone would hold it.
        group: whose ranks must agree; each sends 20 bytes unless they do not.

    Raises:
        CollectiveError: on every rank of the group, with the first parameter that differs and what each rank has.
    """
    if group.size == 1:
        return
    own = {name: list(shape) for name, shape in shapes.items()}
    digest = hashlib.sha1(json.dumps(own, sort_keys=True).encode(), usedforsecurity=False).digest()
    if len(set(gather_objects(digest, group))) == 1:
        return
    found = gather_objects(own, group)
    names = list(dict.fromkeys(name for shapes in found for name in shapes))
    differing = [name for name in names if len({str(shapes.get(name)) for shapes in found}) > 1]
    ranks_of = defaultdict(list)
    for rank, of_rank in zip(group.ranks, found, strict=True):
        ranks_of[str(of_rank.get(differing[0], "absent"))].append(str(rank))
    told = "; ".join(f"{shape} on rank {', '.join(ranks)}" for shape, ranks in ranks_of.items())
    more = f", and on {len(differing) - 1} more" if len(differing) > 1 else ""
    raise CollectiveError(
        f"the ranks of the {group.name} group disagree on the shape of {differing[0]}: {told}{more}",
        "start all ranks with the same configuration and code",
    )
