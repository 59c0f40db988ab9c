"""The whole run, and the sections that are not a group of options of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Optional

from moeflow.schema.balance import BalanceConfig, OverlapConfig
from moeflow.schema.data import DataConfig
from moeflow.schema.fields import option
from moeflow.schema.gate import GateConfig
from moeflow.schema.model import ModelConfig
from moeflow.schema.optim import OptimConfig, ScheduleConfig
from moeflow.schema.parallel import LaunchConfig, ParallelConfig


@dataclass(slots=True)
class RunSection:
    """Identity of the run."""

    seed: int = option(
        0, "seed of initial values, sample order, augmentation and gate noise", minimum=0, maximum=2**32 - 1
    )
    name: Optional[str] = option(None, "name shown in lists and trackers; null takes the recipe's")
    recipe: Optional[str] = option(None, "recipe that the run was made from (filled in)")
    root: str = option("outputs", "folder under which run folders are made", path=True)
    dir: Optional[str] = option(
        None, "run folder; null makes ROOT/RECIPE/TIME-ID; must not hold a run already", path=True
    )


@dataclass(slots=True)
class TrainerConfig:
    """The loop."""

    max_steps: int = option(1000, "optimizer steps in all", minimum=1)
    stop_at: Optional[int] = option(
        None, "save and stop at this step, as if interrupted, with the schedule of max_steps", minimum=1
    )
    log_every: int = option(20, "steps between logged rows", minimum=1)
    eval_every: int = option(500, "steps between evaluations (0: at the end only)", minimum=0)
    eval_batches: Optional[int] = option(None, "evaluation batches; null takes the whole set", minimum=1)
    grad_accum: int = option(1, "micro-batches of one optimizer step", minimum=1)
    skip_bad_steps: int = option(
        3,
        "steps in a row with a loss or gradients that are not finite that are left out; one more ends the run",
        minimum=0,
    )
    compile: bool = option(False, "torch.compile the model")
    profile_steps: int = option(0, "steps that are profiled, with a trace of each rank (0: none)", minimum=0)
    profile_after: int = option(5, "steps of the process before the profiled ones", minimum=0)


@dataclass(slots=True)
class CheckpointConfig:
    """What is saved, and how long it is kept."""

    every: int = option(500, "steps between checkpoints (0: at the end only)", minimum=0)
    keep_last: int = option(2, "newest checkpoints kept", minimum=1)
    keep_best: int = option(1, "best checkpoints by eval/accuracy or eval/loss kept beside them", minimum=0)
    background: bool = option(
        False, "copy to CPU memory and write while training goes on; takes memory for one copy of the state"
    )


@dataclass(slots=True)
class PrecisionConfig:
    """Number formats."""

    dtype: str = option("fp32", "compute dtype; parameters stay fp32", choices=("fp32", "bf16", "fp16"))


@dataclass(slots=True)
class TrackerConfig:
    """Trackers beside the always-written metrics.jsonl and metrics.csv; none of them can end a run."""

    names: List[str] = option([], "any of tensorboard, wandb", choices=("tensorboard", "wandb"))
    project: str = option("moeflow", "W&B project")
    mode: str = option("offline", "W&B mode", choices=("online", "offline", "disabled"))


@dataclass(slots=True)
class OpsConfig:
    """Which implementation the layer's own operations use."""

    backend: str = option("auto", "MOEFLOW_OPS does the same", choices=("auto", "torch", "cupy"))


@dataclass(slots=True)
class RunConfig:
    """Everything that one run is made from; frozen as RUN_DIR/config.yaml."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    resume: Optional[str] = option(
        None, "auto goes on with the newest run of the recipe (or run.dir); null starts anew", choices=("auto",)
    )
