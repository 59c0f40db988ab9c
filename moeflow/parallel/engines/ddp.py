"""Every rank keeps whole parameters, gradients and optimizer state of its part; gradients meet once per step.

The only engine that does all layouts.  The reduction is `moeflow.parallel.gradients`, not DistributedDataParallel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

from accelerate import Accelerator
from torch import Tensor

from moeflow.parallel import state
from moeflow.parallel.engines.base import Engine, OptimizerBuilder, Tensors
from moeflow.parallel.gradients import Gradients
from moeflow.parallel.parallelize import Part
from moeflow.parallel.prepare import prepare, share_overflow
from moeflow.parallel.topology import Topology
from moeflow.schema import RunConfig


class DataParallel(Engine):
    """See the top of the module."""

    def __init__(
        self, config: RunConfig, accelerator: Accelerator, topology: Topology, part: Part, build: OptimizerBuilder
    ):
        super().__init__(config, accelerator, topology, part)
        self.gradients = Gradients(part.model, topology, part.sharding, config.parallel.expert_dp_comm)
        self.optimizer = build(part.model, lambda name, parameter: None)
        self.model, self._wrapped = prepare(accelerator, part.model, self.optimizer)

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        # Accelerate counts for itself which one is the last.
        return self.accelerator.accumulate(self.model)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def step(self) -> tuple[Tensor, bool]:
        self.accelerator.unscale_gradients(self._wrapped)
        self.gradients.reduce()
        norm = self.gradients.norm()
        share_overflow(self.accelerator, self._wrapped, norm)
        taken = self.accelerator.scaler is not None or math.isfinite(norm.item())
        if not taken:
            # Optimizers pass over parameters without a gradient: their counters and moments stay too.
            self._wrapped.zero_grad(set_to_none=True)
        elif self.config.optim.clip_norm is not None:
            self.gradients.clip(self.config.optim.clip_norm, norm)
        self._wrapped.step()
        self._wrapped.zero_grad()
        return norm, taken

    def tensors(self) -> Tensors:
        model = self.part.model
        return {
            **state.model_tensors(model, self.placements),
            **state.optimizer_tensors(model, self.optimizer, self.placements),
        }

    def load(self, read: Callable[[Tensors], None], optimizer: bool) -> None:
        if not optimizer:
            read(state.model_tensors(self.part.model, self.placements))
            return
        state.allocate_optimizer_state(self.optimizer)
        read(self.tensors())
