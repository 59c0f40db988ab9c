"""One process's whole part in a run: join, build, restore, train, report.

train(config, run_dir, resume)   what `moeflow train` and `moeflow resume` run in every rank
evaluate_run(config, run_dir)    what `moeflow eval` runs
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeflow.logging import get_logger
from moeflow.parallel.prepare import leave
from moeflow.schema import RunConfig
from moeflow.train.banner import banner
from moeflow.train.checkpoint import CheckpointStore
from moeflow.train.evaluate import evaluate
from moeflow.train.memory import shortage_named
from moeflow.train.reporter import Reporter
from moeflow.train.rundir import RunDir
from moeflow.train.sample import sample_at_end
from moeflow.train.session import Session, join, open_session
from moeflow.train.shelf import resume_command
from moeflow.train.signals import StopSignal
from moeflow.train.snapshot import Snapshot
from moeflow.train.trainer import Trainer

logger = get_logger(__name__)
CHECKPOINTS = "checkpoints"
Summary = dict[str, Any]


def train(config: RunConfig, run_dir: str | Path, resume: bool = False) -> Summary:
    """Train in this process; every rank of the run calls it.

    Args:
        config: the frozen configuration of the run folder.
        run_dir: of the run.
        resume: go on from the latest checkpoint, if there is one.

    Returns:
        The summary that rank 0 also writes to summary.json.

    Raises:
        MoeflowError: the run cannot start or go on; checkpoints are as they were.
        Stopped: by a signal before the first step.
    """
    with shortage_named(), StopSignal(resume_command(run_dir), begun=False) as stop:
        accelerator, topology = join(config)
        try:
            session = open_session(config, accelerator, topology)
            store = _store(run_dir, session)
            try:
                return _train(session, store, run_dir, resume, stop)
            finally:
                store.close()
        finally:
            leave()


def _train(session: Session, store: CheckpointStore, run_dir: str | Path, resume: bool, stop: StopSignal) -> Summary:
    trainer = Trainer(session, store, stop)
    # Before anything is read or written: a run whose starter was killed may still be at it.
    store.claim()
    step = store.latest() if resume else None
    if step is not None:
        trainer.restore(step, other_data=bool(RunDir(Path(run_dir)).status().get("forced")))
    # After the checkpoint was found good: the reporter cuts what was logged after its step.
    reporter = Reporter(session.config, run_dir, session.topology, step, session.data.source, session.task.unit)
    try:
        reporter.banner(banner(session, run_dir, step))
        if session.topology.is_main:
            RunDir(Path(run_dir)).begin()
        summary = trainer.fit(reporter)
        # Interrupted by a signal: the shell's convention.  A stop that was asked for beforehand is no failure.
        summary["exit_code"] = 0 if trainer.stopped_by is None else 128 + trainer.stopped_by
        sample = sample_at_end(session) if summary["status"] == "finished" else None
        reporter.end(summary, sample)
    finally:
        trainer.profiler.close()
        reporter.close()
    return summary


def evaluate_run(config: RunConfig, run_dir: str | Path, step: int | None = None) -> dict[str, Any]:
    """Evaluate a checkpoint of a run; every rank calls it.

    Args:
        config: the frozen configuration, with overrides.
        run_dir: of the run.
        step: of the checkpoint; None takes the latest.

    Returns:
        "step", "data" (their name, and whether they are real), and the metrics.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    with shortage_named():
        return _evaluate_run(config, run_dir, step)


def _evaluate_run(config: RunConfig, run_dir: str | Path, step: int | None) -> dict[str, Any]:
    accelerator, topology = join(config)
    try:
        session = open_session(config, accelerator, topology, training=False)
        store = _store(run_dir, session)
        found = store.choose(step)
        meta = Snapshot(session).load_model(store, found)
        if meta.get("fingerprint") not in (None, session.data.fingerprint):
            logger.warning("these are other data than those of the training (%s)", meta["fingerprint"])
        accelerator.prepare_model(session.model, device_placement=False, evaluation_mode=True)
        return {"step": found, "data": f"{session.data.name} ({session.data.source})", **evaluate(session)}
    finally:
        leave()


def _store(run_dir: str | Path, session: Session) -> CheckpointStore:
    return CheckpointStore(Path(run_dir) / CHECKPOINTS, rank=session.topology.rank, world=session.topology.layout.world)
