"""Layout of the processes, and how they are started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from moeflow.schema.fields import option


@dataclass(slots=True)
class ParallelConfig:
    """Degrees of parallelism.  dp and edp are derived: world = pp*dp*tp, and dp*tp = edp*ep*etp inside a stage."""

    pp: int = option(1, "pipeline stages", minimum=1)
    tp: int = option(1, "tensor-parallel ranks of attention and dense MLPs", minimum=1)
    ep: int = option(1, "ranks that the experts of one layer are spread over", minimum=1)
    etp: int = option(1, "ranks that the hidden dimension of one expert is cut over", minimum=1)
    sequence_parallel: bool = option(False, "cut activations between tensor-parallel regions along the sequence")
    pp_schedule: str = option("1f1b", "order of the micro-batches", choices=("gpipe", "1f1b", "interleaved"))
    pp_microbatches: Optional[int] = option(
        None,
        "pipeline micro-batches that each of the trainer.grad_accum micro-batches is cut into; null takes pp",
        minimum=1,
    )
    pp_virtual: int = option(2, "stages of each rank with pp_schedule=interleaved", minimum=2)
    pp_split: Optional[List[int]] = option(None, "layers of each stage; null cuts by cost")
    engine: str = option("ddp", "who owns gradients and optimizer state", choices=("ddp", "deepspeed", "fsdp"))
    zero_stage: Optional[int] = option(
        None, "ZeRO stage with engine=deepspeed (0, 1, 2); null takes that of ds_config, or 1", minimum=0, maximum=3
    )
    ds_config: Optional[str] = option(
        None, "DeepSpeed configuration to merge with the recipe: a JSON file, or the JSON text"
    )
    shared_memory: bool = option(
        True, "let CPU ranks of one machine exchange rows through memory that they share, instead of over gloo"
    )
    expert_dp_comm: str = option(
        "dp",
        "over which ranks expert gradients are reduced: the edp group, every rank of the stage, or none",
        choices=("dp", "world", "none"),
    )


@dataclass(slots=True)
class LaunchConfig:
    """Processes and devices."""

    processes: int = option(1, "processes to start (ignored when a launcher started this one)", minimum=1)
    timeout_s: float = option(600.0, "seconds a collective may take before the run ends with a message", above=0.0)
    device: str = option("auto", "device of the processes", choices=("auto", "cpu", "cuda"))
    threads: Optional[int] = option(None, "CPU threads of each process; null shares the cores out", minimum=1)
    port: Optional[int] = option(None, "rendezvous port; null takes a free one", minimum=1, maximum=65535)
