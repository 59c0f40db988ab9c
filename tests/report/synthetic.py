"""A run folder as a long training would leave it, made in a second: for the size and the speed of a report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from moeflow.config.plain import dump
from moeflow.report.reading import Series
from moeflow.schema import RunConfig
from moeflow.schema.gate import SwitchGateConfig
from moeflow.schema.model import GPTConfig
from moeflow.train import rundir
from moeflow.train.expert_log import ExpertLog, LayerLoad
from moeflow.train.rundir import RunDir
from tests.cli.run_folders import add_checkpoint


def make_long_run(
    folder: Path,
    steps: int = 10_000,
    layers: int = 12,
    experts: int = 64,
    every: int = 1,
    seed: int = 0,
    **parallel: int,
) -> RunDir:
    """Make the folder of a finished run that logged each `every` steps; `parallel` are keys like ep=4."""
    rng = np.random.default_rng(seed)
    config = RunConfig(model=GPTConfig(num_layers=layers, num_experts=experts, vocab_size=256), gate=SwitchGateConfig())
    config.run.dir, config.run.recipe, config.run.name = str(folder), "gpt_moe", f"long run {seed}"
    config.trainer.max_steps, config.trainer.log_every, config.trainer.eval_every = steps, every, steps // 20
    for key, value in parallel.items():
        setattr(config.launch if key == "processes" else config.parallel, key, value)
    env = {
        "moeflow": "0.1.0",
        "python": "3.11.7",
        "packages": {"torch": "2.13.0", "accelerate": "1.15.0"},
        "cpu": "a processor with a rather long name @ 2.00GHz",
        "git": {"commit": "0" * 40, "changed_files": []},
    }
    run = rundir.create(
        config,
        dump,
        {
            "env.json": json.dumps(env),
            "command.txt": f"# today in folder\nmoeflow train +recipe=gpt_moe optim.lr=0.002 run.dir={folder}\n",
            "recipe_diff.yaml": "optim.lr: {recipe: 0.001, run: 0.002}\ndata.path: {recipe: null, run: text.txt}\n",
        },
    )
    run.mark("running")
    logged = [step for step in range(1, steps + 1) if step % every == 0 or step == 1]
    with run.metrics_jsonl.open("w") as stream:
        for step in logged:
            stream.write(json.dumps(_row(rng, step, steps)) + "\n")
            if step % (steps // 20) == 0:
                loss = 1.2 + 3 * math.exp(-step / (steps / 6))
                row = {"step": step, "eval/loss": loss, "eval/accuracy": 1 - loss / 5, "eval_s": 1.0}
                stream.write(json.dumps(row) + "\n")
    log = ExpertLog(run.path, every)
    tilt = rng.normal(0, 0.8, (layers, experts))
    for step in logged:
        spread = math.exp(-step / (steps / 4))
        loads = rng.poisson(64 * np.exp(tilt * spread))
        loads[layers // 2, 3] = 0 if step > steps / 2 else loads[layers // 2, 3]
        log.log(
            step,
            {
                f"blocks.{n}.moe": LayerLoad(
                    loads[n].tolist(),
                    int(loads[n].sum() * 0.05 * spread),
                    math.log(experts) * (1 - 0.3 * spread - n / 50),
                )
                for n in range(layers)
            },
        )
    log.close()
    run.summary.write_text(json.dumps({"status": "finished", "step": steps, "max_steps": steps, "data": "real"}))
    run.traces.mkdir()
    (run.traces / "step_00000016.json").write_text(json.dumps(_profile()))
    add_checkpoint(run, steps)
    run.mark("finished", exit_code=0)
    return run


def series_of(values: dict[int, float]) -> Series:
    """A series by hand."""
    return Series(np.array(list(values), np.int64), np.array(list(values.values())))


def _row(rng: np.random.Generator, step: int, steps: int) -> dict:
    decay = math.exp(-step / (steps / 6))
    measured = 0.02 + 0.004 * rng.random()
    return {
        "step": step,
        "loss": 1.0 + 3 * decay + 0.2 * rng.normal(),
        "accuracy": 0.8 - 0.6 * decay + 0.02 * rng.normal(),
        "lr": 1e-3 * min(1.0, step / (0.05 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps)),
        "grad_norm": 0.5 + 4 * decay * rng.random(),
        "epoch": step / 1000,
        "moe/imbalance": 1.2 + 2 * decay + 0.1 * rng.random(),
        "moe/dropped": max(0.0, 0.05 * decay + 0.005 * rng.normal()),
        "moe/dead": int(rng.integers(0, 3)),
        "moe/entropy": 3.5 + 0.5 * decay,
        "moe/load_balance": 1.0 + decay * rng.random(),
        "balance/imbalance_before": 1.5 + decay,
        "balance/imbalance": 1.1 + 0.1 * decay,
        "balance/shadowed": float(rng.integers(0, 4)),
        "balance/predicted_s": measured * (1 + 0.05 * rng.normal()),
        "measured_exchange_s": measured / 3,
        "predicted_exchange_s": measured / 3 * (1 + 0.05 * rng.normal()),
        "tokens_per_s": 50_000 + 2_000 * rng.normal(),
    }


def _profile() -> dict:
    names = ["data", "rest of the model", "gate", "plan", "dispatch", "all-to-all", "experts", "combine", "optimizer"]
    ranks = [
        {
            "rank": rank,
            "forward_s": {name: 0.001 * (n + 1) for n, name in enumerate(names)},
            "backward_s": {name: 0.002 * (n + 1) for n, name in enumerate(names) if n > 1},
        }
        for rank in range(2)
    ]
    return {"step": 16, "steps": 5, "mfu": 0.31, "ranks": ranks}
