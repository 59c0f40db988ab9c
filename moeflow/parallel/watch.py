"""What is said when a collective fails: which one, over which ranks, who was there and who was not.

A rank whose collective times out, or whose partner has gone, leaves a note in the store that all ranks share: what it
was waiting in.  It then looks for the others' notes for a moment.  A rank without a note has died or never came.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from moeflow.errors import CollectiveError

if TYPE_CHECKING:
    from moeflow.parallel.topology import Group

# Seconds to wait for the others' notes: their time limits strike within about the same moment.
PATIENCE_S = 5.0


@contextmanager
def watched(collective: str, group: Group, shape: tuple[int, ...] = ()) -> Iterator[None]:
    """Turn a failure of the collective inside into a CollectiveError that names it.

    Args:
        collective: name, as it stands in the message.
        group: over which it runs.
        shape: of this rank's tensor.
    """
    try:
        yield
    except RuntimeError as error:  # what torch raises for time-outs and for lost partners alike
        raise _explained(collective, group, shape, error) from error


def _explained(collective: str, group: Group, shape: tuple[int, ...], error: RuntimeError) -> CollectiveError:
    own = {"collective": collective, "group": group.name, "shape": list(shape)}
    notes = _exchange(group, own)
    arrived = sorted(rank for rank, note in notes.items() if note["collective"] == collective)
    elsewhere = {rank: note for rank, note in sorted(notes.items()) if rank not in arrived}
    silent = [rank for rank in group.ranks if rank not in notes]
    parts = [f"{collective} over the {group.name} group (ranks {_listed(group.ranks)}) did not finish"]
    parts.append(f"arrived: {_listed(arrived)}")
    if silent:
        parts.append(f"did not arrive: {_listed(silent)} (no sign of life)")
    parts += [
        f"rank {rank} waits in {note['collective']} over its {note['group']} group instead"
        for rank, note in elsewhere.items()
    ]
    shapes = {rank: tuple(notes[rank]["shape"]) for rank in arrived if notes[rank]["shape"]}
    if len(set(shapes.values())) > 1 and collective in SAME_SHAPE:
        parts.append("shapes differ: " + ", ".join(f"rank {r} {s}" for r, s in shapes.items()))
    return CollectiveError("; ".join(parts) + f" ({_reason(error)})", _mend(silent, elsewhere, shapes))


def _reason(error: RuntimeError) -> str:
    """The first line of torch's message, without the place in its sources and gloo's advice."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"\[\S*?:\d+\] ?", "", first).partition(". This is typically")[0]


def _mend(silent: list[int], elsewhere: dict[int, dict], shapes: dict[int, tuple[int, ...]]) -> str:
    if silent:
        return "see the output of the silent ranks; when they are only slow, raise launch.timeout_s"
    if not elsewhere and len(set(shapes.values())) <= 1:
        return "all of this group came, but one of them could not go on: its message says why"
    return "the ranks' calls must match: check that all run the same configuration and code"


# Collectives whose tensors have to be of one shape on all ranks.
SAME_SHAPE = ("all-reduce", "all-gather", "reduce-scatter", "exchange of counts")


def _listed(ranks: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if ranks else "none"


def _exchange(group: Group, own: dict) -> dict[int, dict]:
    """Leave this rank's note and collect those of the group; without a store, only the own one."""
    me = group.ranks[group.rank]
    notes = {me: own}
    try:
        store = dist.PrefixStore("moeflow/failed", dist.distributed_c10d._get_default_store())
        store.set(f"note {me}", json.dumps(own))
        deadline = time.monotonic() + PATIENCE_S
        while len(notes) < group.size and time.monotonic() < deadline:
            for rank in group.ranks:
                if rank not in notes and store.check([f"note {rank}"]):
                    notes[rank] = json.loads(store.get(f"note {rank}"))
            time.sleep(0.05)
        # The store may live in this very process: the others have to read before it ends.
        store.set(f"read {me}", "")
        while not store.check([f"read {rank}" for rank in notes]) and time.monotonic() < deadline:
            time.sleep(0.05)
    except RuntimeError:
        # The store lived in a rank that has died; what this rank knows by itself still is worth saying.
        return notes
    return notes
