"""The parity matrix: a small gpt_moe on every layout that the sizes admit follows the run of one process.

    python -m tests.parallel.parity > docs/parity.md          every case: half an hour on two cores
    python -m tests.parallel.parity --worlds 2 4

What is compared, over 20 AdamW steps with clipping: the loss of each step, the gradient norm, and every parameter after
the last one.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from moeflow.errors import ConfigError
from moeflow.schema.layout import Layout
from tests.distributed import run_ranks
from tests.parallel.gpt_run import STEPS, train

NUM_LAYERS, NUM_HEADS, NUM_EXPERTS, D_HIDDEN = 4, 4, 8, 32
TOLERANCE = 1e-5
MODEL = {"num_layers": NUM_LAYERS, "num_heads": NUM_HEADS, "num_experts": NUM_EXPERTS, "d_hidden": D_HIDDEN}


@dataclass(frozen=True)
class Case:
    """One layout of so many processes, with further `parallel` keys and training options."""

    world: int
    parallel: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in {**self.parallel, **self.more}.items()]
        return f"{self.world}: " + (" ".join(words) or "data parallel")


@dataclass(frozen=True)
class Difference:
    """Largest relative differences from the run of one process."""

    loss: float
    norm: float
    parameter: float
    replicas_equal: bool

    @property
    def holds(self) -> bool:
        return max(self.loss, self.parameter) <= TOLERANCE and self.norm <= 10 * TOLERANCE and self.replicas_equal


def layouts(world: int) -> Iterator[dict[str, int]]:
    """Every (pp, tp, ep, etp) of `world` ranks that the model admits."""
    for pp in (1, 2, 4):
        for tp in (1, 2, 4):
            for etp in (1, 2, 4):
                for ep in (1, 2, 4, 8):
                    try:
                        Layout(world, pp, tp, ep, etp)
                    except ConfigError:
                        continue
                    sizes = {"pp": pp, "tp": tp, "ep": ep, "etp": etp}
                    yield {key: size for key, size in sizes.items() if size > 1}


def variants(layout: dict[str, int]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(further `parallel` keys, training options) that this layout makes sense with."""
    yield {}, {}
    if "tp" in layout:
        yield {"sequence_parallel": True}, {}
    if "pp" in layout:
        yield {"pp_schedule": "gpipe"}, {}
        yield {"pp_schedule": "1f1b", "pp_microbatches": 4}, {}
        if 2 * layout["pp"] <= NUM_LAYERS:
            yield {"pp_schedule": "interleaved"}, {}
    yield {}, {"grad_accum": 2}


def all_cases(worlds: tuple[int, ...] = (2, 4, 8)) -> list[Case]:
    """Every layout; up to four ranks with every variant, beyond with one further variant each, taken in turn."""
    cases = []
    for world in worlds:
        for number, layout in enumerate(layouts(world)):
            found = [Case(world, {**layout, **extra}, more) for extra, more in variants(layout)]
            cases += found if world <= 4 else [found[0], found[1 + number % (len(found) - 1)]]
    return cases


def reference() -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and parameters of one process."""
    return run_ranks(_train, 1, {}, {}, timeout=120, init=False)[0]


def compare(case: Case, alone: tuple[list[float], list[float], dict[str, torch.Tensor]]) -> Difference:
    """Run one case."""
    results = run_ranks(_train, case.world, case.parallel, case.more, timeout=240, init=False)
    names = set().union(*(whole.keys() for _, _, whole in results))
    assert names == alone[2].keys(), f"{case}: parameters {names ^ alone[2].keys()} are on one side only"
    first: dict[str, torch.Tensor] = {}
    equal = all(torch.equal(first.setdefault(name, value), value) for _, _, w in results for name, value in w.items())
    return Difference(
        max(_relative(losses, alone[0]) for losses, _, _ in results),
        max(_relative(norms, alone[1]) for _, norms, _ in results),
        max(((first[n] - value).norm() / value.norm().clamp(min=1e-12)).item() for n, value in alone[2].items()),
        equal,
    )


def _train(parallel: dict[str, Any], more: dict[str, Any]):
    return train(parallel, model=MODEL, **more)


def _relative(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    cases = all_cases(tuple(parser.parse_args().worlds))
    alone, rows, started = reference(), [], time.monotonic()
    for number, case in enumerate(cases):
        found = compare(case, alone)
        rows.append((case, found))
        print(f"{number + 1}/{len(cases)} {case}: {found}", file=sys.stderr, flush=True)
    print(HEAD.format(steps=STEPS, date=datetime.date.today(), cores=os.cpu_count(), torch=torch.__version__, **MODEL))
    worst = [max(getattr(found, name) for _, found in rows) for name in ("loss", "norm", "parameter")]
    held = sum(found.holds for _, found in rows)
    print(
        f"{held} of {len(rows)} cases hold, in {(time.monotonic() - started) / 60:.0f} minutes. Largest differences: ",
        end="",
    )
    print(f"loss {worst[0]:.1e}, norm {worst[1]:.1e}, parameter {worst[2]:.1e}.\n")
    print("| processes | parallel | also | loss | norm | parameters | replicas bit-equal |")
    print("|---|---|---|---|---|---|---|")
    for case, found in rows:
        parallel = " ".join(f"{key}={value}" for key, value in case.parallel.items()) or "(data parallel)"
        also = " ".join(f"{key}={value}" for key, value in case.more.items())
        figures = f"{found.loss:.1e} | {found.norm:.1e} | {found.parameter:.1e}"
        print(f"| {case.world} | {parallel} | {also} | {figures} | {'yes' if found.replicas_equal else 'NO'} |")
    return 0 if held == len(rows) else 1


HEAD = """# Parity of the layouts

Generated by `python -m tests.parallel.parity > docs/parity.md`; {date}, {cores} cores, CPU over gloo, torch {torch}.

A small `gpt_moe` ({num_layers} layers, {num_experts} experts in every second one, top-2, dropless,
load-balance loss on, fp32) is trained for {steps} AdamW steps with clipping on one process and on each layout, with the
same global batch.
The table shows the largest relative difference from the run of one process: of the loss of any step, of any gradient
norm, and of any parameter after the last step (norm of the difference over norm of the parameter).  A case holds when
loss and parameters agree to 1e-5, and parameters that several ranks hold are equal to the last bit.  `make test` runs a
sample of these cases, `make test-all` all of them.
"""


if __name__ == "__main__":
    raise SystemExit(main())
