"""TensorBoard and Weights & Biases: opt-in, in the background, and never a reason for a run to fail or wait.

Each tracker has a thread of its own that imports the package, opens the run and takes rows from a queue.  The thread
starts with the first row, after the first training step, so that a slow import or network delays nothing.  Whatever a
tracker raises switches it off with one warning; metrics.jsonl and metrics.csv hold the same rows.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from moeflow.logging import get_logger
from moeflow.train.files import json_bytes, plain, write_atomic

logger = get_logger(__name__)
IDS = "trackers.json"
QUEUE_ROWS = 10_000
_INSTALL = {"tensorboard": "pip install tensorboard", "wandb": "pip install wandb"}


@dataclass(frozen=True)
class TrackedRun:
    """What trackers are told about a run.

    Attributes:
        run_dir: trackers write inside it.
        name: shown in their lists.
        config: the frozen configuration as nested plain values.
        facts: short ones worth a tag each, such as {"data": "synthetic", "recipe": "cifar_moe"}.
        project: W&B project.
        mode: W&B mode: online, offline or disabled.
        resume_step: step that a resumed run goes on from; None for a new run.
    """

    run_dir: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    project: str = "moeflow"
    mode: str = "offline"
    resume_step: int | None = None


class Tracker(Protocol):
    """What a tracker does; every method may raise anything."""

    def log(self, row: dict[str, float]) -> None:
        """Take one row; "step" is in it."""

    def end(self, summary: dict[str, Any], exit_code: int) -> None:
        """Take the final figures and close."""


class Trackers:
    """All trackers of one run; silent on all ranks but 0.

    Args:
        names: any of `FACTORIES`.
        run: what they are told.
        rank: of this process.
    """

    def __init__(self, names: Iterable[str], run: TrackedRun, *, rank: int = 0):
        wanted = [] if rank != 0 else list(dict.fromkeys(names))
        self._background = [_Background(name, FACTORIES[name], run) for name in wanted]

    def log(self, row: dict[str, Any]) -> None:
        """Hand a row with "step" to all trackers; returns at once.  Values that are no numbers are left out."""
        if self._background:
            numbers = {key: float(value) for key, value in row.items() if _is_number(value)}
            numbers["step"] = int(row["step"])
            for background in self._background:
                background.put(lambda tracker: tracker.log(numbers))

    def end_training(
        self, summary: dict[str, Any] | None = None, *, exit_code: int = 0, timeout_s: float = 60.0
    ) -> None:
        """Close all trackers; call it in `finally`.

        Args:
            summary: final figures.
            exit_code: 0 when the run ended well.
            timeout_s: seconds to wait for uploads, for all trackers together.
        """
        figures = plain(summary or {})
        for background in self._background:
            background.put(lambda tracker: tracker.end(figures, exit_code), last=True)
        for background in self._background:
            background.join(timeout_s)
        self._background = []


class _Background:
    """The thread of one tracker."""

    def __init__(self, name: str, factory: Callable[[TrackedRun], Tracker], run: TrackedRun):
        self.name = name
        self._factory, self._run = factory, run
        self._calls: queue.Queue[tuple[Callable[[Tracker], None], bool]] = queue.Queue(QUEUE_ROWS)
        self._thread: threading.Thread | None = None
        self._off = False

    def put(self, call: Callable[[Tracker], None], last: bool = False) -> None:
        if self._off:
            return
        if self._thread is None:
            # A daemon, so that a hung upload cannot keep the process alive.
            self._thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
            self._thread.start()
        try:
            self._calls.put_nowait((call, last))
        except queue.Full:
            self._switch_off(f"it is {QUEUE_ROWS} rows behind")

    def join(self, timeout_s: float) -> None:
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._switch_off(f"it did not end within {timeout_s:g} s")

    def _work(self) -> None:
        try:
            tracker = self._factory(self._run)
            last = False
            while not last and not self._off:
                call, last = self._calls.get()
                call(tracker)
        except ImportError as exc:
            self._switch_off(f"{exc}; {_INSTALL[self.name]}")
        except BaseException as exc:  # SystemExit included: whatever a tracker does, training goes on
            self._switch_off(f"{type(exc).__name__}: {exc}")

    def _switch_off(self, reason: str) -> None:
        if not self._off:
            self._off = True
            offline = "; tracker.mode=offline needs no network" if self._run.mode == "online" else ""
            logger.warning("tracker %s is off: %s%s (metrics.jsonl goes on)", self.name, reason, offline)


class _TensorBoard:
    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resume_step is None else run.resume_step + 1
        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purge)
        self._writer.add_text("config", f"```json\n{json_bytes(run.config).decode()}```")
        for key, value in run.facts.items():
            self._writer.add_text(key, value)

    def log(self, row: dict[str, float]) -> None:
        step = int(row["step"])
        for key, value in row.items():
            if key != "step":
                self._writer.add_scalar(key, value, step)

    def end(self, summary: dict[str, Any], exit_code: int) -> None:
        self._writer.add_text("summary", f"```json\n{json_bytes({**summary, 'exit_code': exit_code}).decode()}```")
        self._writer.close()


class _Wandb:
    def __init__(self, run: TrackedRun):
        import wandb

        # Silent also keeps it from asking for a key on the terminal in the middle of training: it raises instead.
        settings = wandb.Settings(console="off", silent=True)
        wandb.setup(settings)
        mode: Any = run.mode  # W&B declares a Literal; the configuration has checked the choices
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=_remembered_id(run.run_dir),
            resume="allow",
            dir=str(run.run_dir),
            mode=mode,
            config={**plain(run.config), "facts": dict(run.facts)},
            tags=[f"{key}:{value}"[:64] for key, value in run.facts.items()],
            settings=settings,
        )
        # Rows that a resumed run does again would be refused on W&B's own step counter, which only rises.
        self._run.define_metric("*", step_metric="step")
        if self._run.url:
            logger.info("W&B: %s", self._run.url)
        elif run.mode == "offline":
            logger.info("W&B: offline; upload with: wandb sync %s", Path(self._run.dir).parent)

    def log(self, row: dict[str, float]) -> None:
        self._run.log(row)

    def end(self, summary: dict[str, Any], exit_code: int) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=exit_code)


FACTORIES: dict[str, Callable[[TrackedRun], Tracker]] = {"tensorboard": _TensorBoard, "wandb": _Wandb}


def _remembered_id(run_dir: Path) -> str:
    """Return the run's id in W&B, the same after a resume."""
    path = run_dir / IDS
    if path.is_file():
        return str(json.loads(path.read_text())["wandb"])
    fresh = secrets.token_hex(4)
    write_atomic(path, json_bytes({"wandb": fresh}))
    return fresh


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (hasattr(value, "item") and getattr(value, "ndim", 1) == 0)
