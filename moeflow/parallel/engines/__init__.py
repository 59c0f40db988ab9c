"""Engines of `parallel.engine`: ddp, deepspeed and fsdp; docs/engines.md compares them."""

from __future__ import annotations

from accelerate import Accelerator

from moeflow.parallel.engines.base import Engine, OptimizerBuilder
from moeflow.parallel.parallelize import Part
from moeflow.parallel.topology import Topology
from moeflow.schema import RunConfig
from moeflow.schema.engines import zero_stage

__all__ = ["Engine", "make_engine"]


def make_engine(
    config: RunConfig, accelerator: Accelerator, topology: Topology, part: Part, build: OptimizerBuilder
) -> Engine:
    """Make the engine of a run; it takes over the part's model.

    Args:
        config: the frozen configuration.
        accelerator: of this process.
        topology: of this rank.
        part: this rank's part of the model, with initial values.
        build: makes the optimizer.

    Raises:
        ConfigError: the engine's library is not installed.
    """
    arguments = (config, accelerator, topology, part, build)
    if config.parallel.engine == "deepspeed":
        from moeflow.parallel.engines.deepspeed import DeepSpeedPlain, DeepSpeedZero

        return DeepSpeedZero(*arguments) if zero_stage(config) else DeepSpeedPlain(*arguments)
    if config.parallel.engine == "fsdp":
        from moeflow.parallel.engines.fsdp import FullySharded

        return FullySharded(*arguments)
    from moeflow.parallel.engines.ddp import DataParallel

    assert config.parallel.engine == "ddp", config.parallel.engine
    return DataParallel(*arguments)
