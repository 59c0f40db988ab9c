"""Optimizer and learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from moeflow.schema.fields import option


@dataclass(slots=True)
class OptimConfig:
    """Optimizer."""

    name: str = option("adamw", "optimizer", choices=("adamw", "sgd"))
    lr: float = option(1e-3, "peak learning rate", above=0.0)
    weight_decay: float = option(0.01, "decoupled weight decay of matrices and convolutions", minimum=0.0)
    betas: List[float] = option([0.9, 0.95], "AdamW's decay rates of both moments", minimum=0.0, below=1.0, length=2)
    eps: float = option(1e-8, "AdamW's epsilon", above=0.0)
    momentum: float = option(0.9, "SGD's momentum", minimum=0.0, below=1.0)
    nesterov: bool = option(True, "SGD with Nesterov momentum")
    clip_norm: Optional[float] = option(1.0, "largest gradient norm over all parameters; null does not clip", above=0.0)


@dataclass(slots=True)
class ScheduleConfig:
    """Learning rate over the steps."""

    name: str = option("cosine", "shape after warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = option(0, "steps of linear warm-up", minimum=0)
    min_ratio: float = option(0.0, "last learning rate over the peak one", minimum=0.0, maximum=1.0)
    total_steps: Optional[int] = option(
        None, "step at which the last rate is reached; null takes trainer.max_steps", minimum=1
    )
