"""A run that is killed again and again, at random moments, and goes on from its latest checkpoint each time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeflow.schema import CheckpointConfig, RunConfig
from moeflow.train.shelf import Shelf
from tests.distributed import free_port, rank_environment, run_ranks
from tests.parallel.gpt_run import config_of
from tests.train.forked import start

PATIENCE_S = 120.0


@dataclass
class Toll:
    """What the kills came to.

    Attributes:
        kills: processes killed while they trained or started to.
        during_saves: of these, while a checkpoint was being written.
        before_first: of these, before the life had done a step.
        repeated: steps done again in all.
        seconds: wall-clock time.
    """

    kills: int = 0
    during_saves: int = 0
    before_first: int = 0
    repeated: int = 0
    seconds: float = 0.0


def config_for(world: int, steps: int, background: bool = False, parallel: dict | None = None) -> RunConfig:
    """A small GPT, its experts spread over the ranks, saved at every second step."""
    config = config_of(parallel or {"ep": world}, checkpoint=CheckpointConfig(every=2, background=background))
    # Never at its last step, which would write a text.
    trainer = dataclasses.replace(config.trainer, max_steps=steps + 1, stop_at=steps, log_every=1, eval_every=0)
    return dataclasses.replace(config, trainer=trainer)


def _rank(config: RunConfig, folder: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    log = os.open(f"{folder}/life.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    from moeflow.train.job import train

    train(config, folder, resume=True)


def _train(config: RunConfig, folder: str) -> int:
    from moeflow.train.job import train

    return train(config, folder, resume=False)["step"]


def unbroken(config: RunConfig, world: int, folder: Path) -> None:
    """The run without kills."""
    folder.mkdir()
    run_ranks(_train, world, config, str(folder), timeout=300, init=False)


def killed(config: RunConfig, world: int, folder: Path, kills: int, seed: int) -> Toll:
    """Kill one rank at random `kills` times, then let the run end.

    Raises:
        AssertionError: a completed checkpoint was lost, or a life ended by itself.
    """
    folder.mkdir()
    draw, toll, shelf, began = random.Random(seed), Toll(), Shelf(folder / "checkpoints"), time.monotonic()
    known = 0
    while toll.kills < kills:
        ranks = _life(config, world, folder)
        try:
            first = _wait_for_moment(shelf, known, ranks, draw)
            before = shelf.latest() or 0
            saving = any((folder / "checkpoints").glob("*.tmp"))
            alive = [rank for rank in ranks if rank.is_alive()]
            assert len(alive) == world, f"the run ended by itself: {(folder / 'life.log').read_text()[-2000:]}"
            draw.choice(ranks).kill()
            # A launcher ends the others a moment later.
            time.sleep(draw.uniform(0.0, 0.5) if world > 1 else 0.0)
        finally:
            _end(ranks)
        toll.kills += 1
        toll.during_saves += saving
        toll.before_first += first
        after = shelf.latest() or 0
        assert after >= before >= known, (known, before, after)
        toll.repeated += max(0, _last_row(folder) - after)
        known = after
        assert known < config.trainer.stop_at, "the run was done before all kills"
    ranks = _life(config, world, folder)
    try:
        for rank in ranks:
            rank.join(300)
        assert [rank.exitcode for rank in ranks] == [0] * world, (folder / "life.log").read_text()[-2000:]
    finally:
        _end(ranks)
    toll.seconds = time.monotonic() - began
    return toll


def _life(config: RunConfig, world: int, folder: Path) -> list[Any]:
    port = free_port()
    return [start(_rank, config, str(folder), _environment(rank, world, port)) for rank in range(world)]


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return rank_environment(rank, world, port) if world > 1 else {}


def _wait_for_moment(shelf: Shelf, known: int, ranks: list[Any], draw: random.Random) -> bool:
    """Wait for a moment: in one of six lives while it starts, else around one of its first checkpoints."""
    if draw.random() < 1 / 6:
        time.sleep(draw.uniform(0.0, 1.0))
        return (shelf.latest() or 0) <= known
    goal, deadline = known + 2 * draw.randint(1, 3), time.monotonic() + PATIENCE_S
    while (shelf.latest() or 0) < goal:
        assert time.monotonic() < deadline, "no checkpoint came"
        if not all(rank.is_alive() for rank in ranks):
            return False
        time.sleep(0.001)
    time.sleep(draw.uniform(0.0, 0.1))
    return False


def _last_row(folder: Path) -> int:
    from moeflow.train.metrics import read_rows

    steps = [0]
    with contextlib.suppress(FileNotFoundError):
        steps += [row["step"] for row in read_rows(folder / "metrics.jsonl")]
    return max(steps)


def _end(ranks: list[Any]) -> None:
    for rank in ranks:
        rank.kill()
        rank.join()
