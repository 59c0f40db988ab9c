"""Figures of docs/checkpoints.md, measured and written into their places there.

    python -m benchmarks.checkpoints layouts     saved on each layout, resumed on each other
    python -m benchmarks.checkpoints background  what a save takes from training
    python -m benchmarks.checkpoints kills       fifty kills at random moments of a run
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


def background() -> str:
    """What a save takes from training, waited for and in the background."""
    import multiprocessing

    with (
        tempfile.TemporaryDirectory(dir=PAGE.parent.parent) as name,
        multiprocessing.get_context("spawn").Pool(1) as pool,
    ):
        rows = pool.apply(_background, (name,))
    lines = ["| | call | steps until it is on disk | training waits in all |", "|---|---:|---:|---:|"]
    waited = rows[0][1]
    for label, call, during in rows:
        total = call + during
        share = "" if total == waited else f" ({total / waited:.0%})"
        lines.append(f"| {label} | {call:.2f} s | {during:+.2f} s | {total:.2f} s{share} |")
    return "\n".join(lines)


def _background(folder: str, megabytes: int = 480, saves: int = 5) -> list[tuple[str, float, float]]:
    """(label, median seconds of the call, median seconds by which the steps under it were longer)."""
    import statistics

    import torch

    from moeflow.train.checkpoint import CheckpointStore, Keep

    torch.set_num_threads(1)
    tensors = {f"model/w{i}": torch.randn(1 << 20) for i in range(megabytes // 4)}
    a, b = torch.randn(700, 700), torch.randn(700, 700)

    def step() -> float:
        started = time.perf_counter()
        for _ in range(2):
            torch.mm(a, b)
        for tensor in list(tensors.values())[:4]:
            tensor.add_(1e-3)
        return time.perf_counter() - started

    store = CheckpointStore(folder)
    store.save(0, tensors, {}, {}, wait=False)  # the copy's memory is new in the first one
    store.wait()
    step()
    rows = []
    for label, wait in (("waited for", True), ("`checkpoint.background=true`", False)):
        calls, longer = [], []
        for number in range(saves):
            started = time.perf_counter()
            handle = store.save(number + 1, tensors, {}, {}, wait=wait, keep=Keep(1, 0))
            calls.append(time.perf_counter() - started)
            spent, count = 0.0, 0
            while not handle.done():
                spent += step()
                count += 1
            # Right after it, so that whatever else the machine does weighs on both.
            longer.append(spent - count * statistics.mean(step() for _ in range(max(count, 20))))
        rows.append((label, statistics.median(calls), statistics.median(longer)))
    store.close()
    return rows


def kills(number: int = 50, steps: int = 400) -> str:
    """Runs of a small GPT that are killed again and again; asserts that the end is that of the run without kills."""
    from tests.train.test_kills import check

    lines = ["| processes | saving | kills | while saving | before a step | steps done again | the end is the same |"]
    lines.append("|---:|---|---:|---:|---:|---:|---|")
    for world in (1, 2):
        for in_background in (False, True):
            with tempfile.TemporaryDirectory() as name:
                toll = check(Path(name), world, number, steps, in_background, seed=world)
            way = "in the background" if in_background else "waited for"
            lines.append(
                f"| {world} | {way} | {toll.kills} | {toll.during_saves} | {toll.before_first} | {toll.repeated} of "
                f"{steps} | to the bit |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {"layouts": layouts, "background": background, "kills": kills}


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
