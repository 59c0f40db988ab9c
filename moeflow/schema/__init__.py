"""The typed configuration of a run: dataclasses from the standard library, and nothing else.

These classes are the schema that Hydra validates against, the defaults, and the help text of every key (the `help`
metadata of a field).  They import neither torch nor Hydra, so the planner and the command line can use them at once.

    RunConfig -> run, model, gate, parallel, data, optim, schedule, precision, trainer, checkpoint, tracker, launch, ops
"""

from moeflow.schema.balance import BalanceConfig, OverlapConfig
from moeflow.schema.data import DATASETS, CifarData, DataConfig, TextData
from moeflow.schema.gate import (
    GATES,
    GateConfig,
    GShardGateConfig,
    NaiveGateConfig,
    NoisyGateConfig,
    SwitchGateConfig,
)
from moeflow.schema.model import MODELS, ConvNetConfig, GPTConfig, LeNetConfig, ModelConfig
from moeflow.schema.optim import OptimConfig, ScheduleConfig
from moeflow.schema.parallel import LaunchConfig, ParallelConfig
from moeflow.schema.run import (
    CheckpointConfig,
    OpsConfig,
    PrecisionConfig,
    RunConfig,
    RunSection,
    TrackerConfig,
    TrainerConfig,
)

__all__ = [
    "DATASETS",
    "GATES",
    "MODELS",
    "BalanceConfig",
    "CheckpointConfig",
    "CifarData",
    "ConvNetConfig",
    "DataConfig",
    "GPTConfig",
    "GShardGateConfig",
    "GateConfig",
    "LaunchConfig",
    "LeNetConfig",
    "ModelConfig",
    "NaiveGateConfig",
    "NoisyGateConfig",
    "OpsConfig",
    "OptimConfig",
    "OverlapConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "RunSection",
    "ScheduleConfig",
    "SwitchGateConfig",
    "TextData",
    "TrackerConfig",
    "TrainerConfig",
]
