"""Profiling of a few steady steps: a trace for each rank, and a table of where the time went.

    RUN_DIR/traces/step_00000015.rank0.json.gz     opens in https://ui.perfetto.dev and chrome://tracing
    RUN_DIR/traces/step_00000015.json              the table, and what it was made from, by rank

The file names state the last step that was profiled.  The profiled steps are the ones from `trainer.profile_after` on,
counted from the start of the process, after one more that warms the profiler up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from moeflow.logging import get_logger
from moeflow.models import build_model
from moeflow.models.flops import count_parameters, forward_flops
from moeflow.ops.phases import STEP, marks
from moeflow.parallel import collectives
from moeflow.train.files import json_bytes, write_atomic
from moeflow.train.phase_times import Range, Times, add_up
from moeflow.train.profile_table import table
from moeflow.train.session import Session

logger = get_logger(__name__)

# The first profiled step pays for the profiler's own start.
WARM_UP = 1
_NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class StepProfiler:
    """Profiles the steps that the configuration names; does nothing where it names none.

    Args:
        session: of this process.
        traces: folder for traces and table.
    """

    def __init__(self, session: Session, traces: Path):
        trainer = session.config.trainer
        self.session, self.traces = session, traces
        self._first = trainer.profile_after
        self._last = trainer.profile_after + WARM_UP + trainer.profile_steps if trainer.profile_steps else 0
        self._done = 0
        self._seconds: list[float] = []
        self._profile: profile | None = None
        self._marks = contextlib.ExitStack()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds one optimizer step."""
        if self._done == self._first and self._first < self._last:
            self._start()
        self._done += 1
        if self._profile is None:
            yield
            return
        started = time.perf_counter()
        with torch.profiler.record_function(STEP):
            yield
            if self.session.device.type == "cuda":
                torch.cuda.synchronize(self.session.device)
        self._seconds.append(time.perf_counter() - started)

    def report(self, step: int, ending: bool = False) -> tuple[list[str], float]:
        """Finish after the last profiled step; collective then.

        Args:
            step: optimizer steps done.
            ending: whether no more steps follow.

        Returns:
            Lines of the table on the step that ends the profile, none elsewhere; and the seconds that it took.
        """
        started = time.perf_counter()
        return self._report(step, ending), time.perf_counter() - started

    def _report(self, step: int, ending: bool) -> list[str]:
        if self._profile is None:
            if ending and self._done <= self._first < self._last:
                logger.warning("no step was profiled: only %d were done (trainer.profile_after=N)", self._done)
            return []
        if self._done < self._last and not ending:
            return []
        recorded = self._stop()
        if len(self._seconds) <= WARM_UP:
            logger.warning("no steady step was profiled: the run ended too early (trainer.profile_after=N)")
            return []
        return self._finish(recorded, step)

    def close(self) -> None:
        """Stop, whatever was recorded; may be called again."""
        if self._profile is not None:
            self._stop()

    def _start(self) -> None:
        # Its "USDT" lines on standard error are for those who debug the profiler itself.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        activities = [ProfilerActivity.CPU]
        if self.session.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.reset_peak_memory_stats(self.session.device)
        self._marks.enter_context(marks())
        self._profile = profile(activities=activities)
        self._profile.start()

    def _stop(self) -> profile:
        assert self._profile is not None
        recorded, self._profile, self._last = self._profile, None, 0
        recorded.stop()
        self._marks.close()
        return recorded

    def _finish(self, recorded: profile, step: int) -> list[str]:
        world = self.session.topology["world"]
        self.traces.mkdir(exist_ok=True)
        trace = self.traces / f"step_{step:08d}.rank{world.rank}.json.gz"
        recorded.export_chrome_trace(str(trace))
        seconds = self._seconds[WARM_UP:]
        own = {
            "rank": world.rank,
            "trace": trace.name,
            "measured_step_s": sum(seconds) / len(seconds),
            "peak_bytes": peak_bytes(self.session.device),
            "peak_flops": matmul_flops(self.session.device, _NAMES[self.session.config.precision.dtype]),
            **_plain(add_up(ranges_of(recorded), skip=WARM_UP)),
        }
        ranks = collectives.gather_objects(own, world)
        content = {"step": step, "steps": len(seconds), **self._work(ranks), "ranks": ranks}
        if world.rank == 0:
            write_atomic(self.traces / f"step_{step:08d}.json", json_bytes(content))
        return table(content, self.traces)

    def _work(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """FLOPs of a step on active parameters, and the share of what the devices could do in that time."""
        config = self.session.config
        with torch.device("meta"):
            model = build_model(config.model, config.gate)
        total, active = count_parameters(model)
        sample = self.session.data.train.fetch(torch.zeros(1, dtype=torch.int64), 0)["inputs"]
        # The backward pass computes every product twice: for the inputs and for the weights.
        flops = 3 * forward_flops(model, sample) * config.data.batch_size
        step_s = max(rank["measured_step_s"] for rank in ranks)
        able = sum(rank["peak_flops"] for rank in ranks)
        return {
            "parameters": total,
            "active_parameters": active,
            "flops": flops,
            "step_s": step_s,
            "mfu": flops / (step_s * able),
            "device": self.session.device.type,
        }


def ranges_of(recorded: profile) -> list[Range]:
    """The ranges of a stopped profiler that ran on CPU threads."""
    found = []
    for event in recorded.events() or []:
        if event.device_type != torch.autograd.DeviceType.CPU or event.is_async:
            continue
        # Kernels are listed with every range around their launch; those without children started them.
        kernels = sum(kernel.duration for kernel in event.kernels) if not event.cpu_children else 0.0
        found.append(
            Range(
                event.name,
                event.time_range.start,
                event.time_range.end,
                event.thread,
                event.sequence_nr,
                event.fwd_thread or 0,
                event.scope == 1,
                kernels,
            )
        )
    return found


def peak_bytes(device: torch.device) -> int:
    """Peak memory: of the profiled steps on a GPU, of the whole process since its start (resident) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that a large matrix product reaches here now: what the share of a model is taken of."""
    size = 8192 if device.type == "cuda" else 1024
    # TF32 and the like are what the run itself has set.
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _plain(times: Times) -> dict[str, Any]:
    content = dataclasses.asdict(times)
    rows = [
        {"s": seconds, "calls": calls, "operator": name, "phase": phase}
        for seconds, calls, name, phase in times.operators[:10]
    ]
    return {**content, "operators": rows}
