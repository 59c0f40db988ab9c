"""Figures of docs/checkpoints.md, measured and written into their places there.

    python -m benchmarks.checkpoints layouts     saved on each layout, resumed on each other
    python -m benchmarks.checkpoints layouts --dry-run     print only

Run from the checkout's root; a place in the page is between `<!-- NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "checkpoints.md"


def layouts() -> str:
    """Largest relative difference of the ten losses after a change of layout, to a run on one process in one go."""
    from tests.train.layouts import PLACES, SAVED_AT, largest_difference, reference, resumed, run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        losses = reference(folder / "reference")
        lines = ["| saved on \\ resumed on | " + " | ".join(place.name for place in PLACES) + " |"]
        lines.append("|---|" + "---:|" * len(PLACES))
        for source in PLACES:
            saved = folder / "saved" / source.name
            saved.parent.mkdir(exist_ok=True)
            run(source, saved, stop_at=SAVED_AT)
            cells = []
            for target in PLACES:
                after = resumed(saved, target, folder / f"{source.name} to {target.name}")
                cells.append(f"{largest_difference(after, losses[SAVED_AT:]):.1e}")
                print(f"{source.name} -> {target.name}: {cells[-1]}", flush=True)
            lines.append(f"| {source.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {"layouts": layouts}


def replace(page: str, name: str, text: str) -> str:
    """Put `text` between the marks of `name`."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = page.partition(start)
    _, mark, after = rest.partition(end)
    assert mark, f"{PAGE} has no place {name}"
    return f"{before}{start}{text}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all where left out")
    parser.add_argument("--dry-run", action="store_true", help="print only")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in args.parts or PARTS:
        started = time.perf_counter()
        text = PARTS[name]()
        print(f"\n{text}\n\n{name}: {time.perf_counter() - started:.0f} s")
        if not args.dry_run:
            PAGE.write_text(replace(PAGE.read_text(encoding="utf-8"), name, text), encoding="utf-8")


if __name__ == "__main__":
    main()
