"""Figures of docs/engines.md: what each engine keeps on a rank, what a step takes, and how close it stays to `ddp`.

    python -m benchmarks.engines              measure, and write the table into its place in the page
    python -m benchmarks.engines --dry-run    print only

Run from the checkout's root.  Bytes are those that a rank has allocated beyond what it had before the model; time is
the processor time of all ranks, which other work on the machine disturbs less than the clock.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeflow.data.loader import train_batches
from moeflow.parallel.engines import Engine, make_engine
from moeflow.parallel.prepare import leave
from moeflow.schema import PrecisionConfig, RunConfig
from moeflow.train.optim import build_optimizer
from moeflow.train.session import join, open_session
from moeflow.train.step import batch_means, make_stepper
from tests.distributed import run_ranks
from tests.parallel.gpt_run import config_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "engines.md"
STEPS, WARM = 12, 3
MODEL = {"num_layers": 4, "d_model": 256, "num_heads": 4, "d_hidden": 1024, "num_experts": 8, "moe_every": 2}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "deepspeed, ZeRO-0": {"engine": "deepspeed", "zero_stage": 0},
    "deepspeed, ZeRO-1": {"engine": "deepspeed", "zero_stage": 1},
    "deepspeed, ZeRO-2": {"engine": "deepspeed", "zero_stage": 2},
    "fsdp": {"engine": "fsdp"},
}
CASES = [(2, "fp32"), (4, "fp32"), (4, "bf16")]


@dataclass(frozen=True)
class Figures:
    """Of one rank.

    Attributes:
        losses: of the whole batch.
        memory: bytes before the optimizer's step, or after it where that is more.
        seconds: processor time of one step.
    """

    losses: list[float]
    memory: int
    seconds: float


def config_for(parallel: dict[str, Any], dtype: str) -> RunConfig:
    """A GPT of ten million parameters, most of them experts."""
    config = config_of(parallel, model=MODEL, precision=PrecisionConfig(dtype))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=64))


class _Malloc(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def held() -> int:
    """Bytes that this process has allocated, as glibc counts them: all tensors, and little else."""
    gc.collect()
    count = ctypes.CDLL(None).mallinfo2
    count.restype = _Malloc
    found = count()
    return int(found.uordblks + found.hblkhd)


def watch(engine: Engine, seen: list[int]) -> None:
    """Note the bytes before one step of the optimizer."""
    step = engine.step

    def noting() -> tuple[Tensor, bool]:
        if len(seen) == 0:
            seen.append(held())
        return step()

    engine.step = noting  # type: ignore[method-assign]


def measure(parallel: dict[str, Any], dtype: str) -> Figures:
    """Train on this rank."""
    config = config_for(parallel, dtype)
    accelerator, topology = join(config)
    session = open_session(config, accelerator, topology)
    nothing = held() - sum(tensor.numel() * tensor.element_size() for tensor in session.model.parameters())
    engine = make_engine(
        config, accelerator, topology, session.part, lambda model, split: build_optimizer(model, config.optim, split)
    )
    stepper = make_stepper(session, engine)
    batches = train_batches(
        session.data.train,
        micro_batch=session.micro_batch,
        dp_size=session.dp_size,
        dp_rank=topology["dp"].rank,
        seed=config.run.seed,
        start=0,
        device=session.device,
    )
    losses: list[float] = []
    before: list[int] = []
    seconds = 0.0
    for number in range(STEPS):
        if number == WARM:
            watch(engine, before)
        began = time.process_time()
        output = stepper.step(batches)
        seconds += time.process_time() - began if number > WARM else 0.0
        losses.append(batch_means(session, {"loss": torch.stack([output.loss, torch.ones(())])})["loss"])
        del output
    memory = max(held(), *before) - nothing
    leave()
    return Figures(losses, memory, seconds / (STEPS - WARM - 1))


def table() -> str:
    """A row for each engine on each number of processes."""
    lines = [
        "| processes | precision | engine | memory | time | loss |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for world, dtype in CASES:
        plain: list[Figures] = []
        for name, keys in ENGINES.items():
            ranks = run_ranks(measure, world, {"ep": 2, **keys}, dtype, timeout=300, init=False)
            seconds = sum(rank.seconds for rank in ranks)
            plain = plain or ranks
            ratio = seconds / sum(rank.seconds for rank in plain)
            away = max(abs(a - b) / b for a, b in zip(ranks[0].losses, plain[0].losses, strict=True))
            memory = max(rank.memory for rank in ranks) / 2**20
            lines.append(f"| {world} | {dtype} | {name} | {memory:.0f} MiB | {ratio:.2f} | {away:.1e} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print only")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    text = table()
    if not args.dry_run:
        from benchmarks.checkpoints import replace

        PAGE.write_text(replace(PAGE.read_text(encoding="utf-8"), "figures", text), encoding="utf-8")


if __name__ == "__main__":
    main()
