"""Saved on one layout, resumed on another: the runs behind the reshard matrix."""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from moeflow.schema import CheckpointConfig, RunConfig
from moeflow.schema.gate import AuxFreeGateConfig
from moeflow.train.metrics import read_rows
from tests.distributed import run_ranks
from tests.parallel.gpt_run import config_of

SAVED_AT, STEPS = 5, 15


@dataclass(frozen=True)
class Place:
    """One layout of the matrix: processes, and its keys of `parallel`."""

    name: str
    world: int
    parallel: dict


PLACES = [
    Place("1 process", 1, {}),
    Place("ep=2", 2, {"ep": 2}),
    Place("ep=4", 4, {"ep": 4}),
    Place("tp=2 x ep=2", 4, {"tp": 2, "ep": 2}),
    Place("pp=2 x ep=2", 4, {"pp": 2, "ep": 2}),
    Place("etp=2", 2, {"etp": 2}),
    Place("DeepSpeed ZeRO-1, ep=2", 4, {"ep": 2, "engine": "deepspeed"}),
    Place("FSDP2, ep=2", 4, {"ep": 2, "engine": "fsdp"}),
]


def config_at(place: Place, stop_at: int) -> RunConfig:
    """A small GPT with two MoE layers of four experts; clipping, a load-balance loss, and a gate with a state."""
    config = config_of(place.parallel, checkpoint=CheckpointConfig(every=0))
    # Never at its last step, which would write a text after each run.
    trainer = dataclasses.replace(config.trainer, max_steps=STEPS + 1, stop_at=stop_at, log_every=1, eval_every=0)
    gate = AuxFreeGateConfig(load_balance_coef=0.05, load_balance_scope="sequence", bias_update_rate=0.01)
    return dataclasses.replace(config, trainer=trainer, gate=gate)


def _train(config: RunConfig, folder: str, resume: bool) -> int:
    from moeflow.train.job import train

    return train(config, folder, resume)["step"]


def run(place: Place, folder: Path, stop_at: int = STEPS, resume: bool = False) -> list[float]:
    """Train at `place` in `folder`; returns the losses of all steps that the folder knows."""
    folder.mkdir(exist_ok=True)
    ended = run_ranks(_train, place.world, config_at(place, stop_at), os.fspath(folder), resume, timeout=90, init=False)
    assert ended == [stop_at] * place.world
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


def reference(folder: Path) -> list[float]:
    """Losses of all steps on one process in one go."""
    return run(PLACES[0], folder)


def resumed(saved: Path, place: Place, folder: Path) -> list[float]:
    """Losses of the steps after `SAVED_AT`, from a copy of what was saved, at another place."""
    shutil.copytree(saved, folder)
    losses = run(place, folder, resume=True)
    assert len(losses) == STEPS
    return losses[SAVED_AT:]


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Of pairs of losses, relative."""
    assert len(losses) == len(reference)
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))
