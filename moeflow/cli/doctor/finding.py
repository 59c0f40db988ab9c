"""One line of the doctor's report."""

from __future__ import annotations

import dataclasses
from typing import Literal

Status = Literal["ok", "note", "warn", "fault"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one thing.

    Attributes:
        group: heading it stands under.
        name: of the thing.
        status: "ok"; "note" for what is merely worth knowing; "warn" for what spoils some use; "fault" for what keeps
            training on CPU from working, which makes the exit code 1.
        detail: what was found, one sentence at most.
        mend: a command or setting that mends it, where it needs mending.
    """

    group: str
    name: str
    status: Status
    detail: str
    mend: str | None = None


def size(num_bytes: float) -> str:
    """Write bytes the way people read them: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
