"""Experts spread over the ranks in a DeepSpeed script of the user's own, with `deepspeed.initialize`.

DeepSpeed finds experts by three things: a module of its MoE class somewhere in the model, marks on the parameters, and
parameter groups of the optimizer.  `spread` gives it all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from moeflow.errors import CheckpointError
from moeflow.parallel.engines.deepspeed import EXPERTS, import_deepspeed, mark_experts, register_groups
from moeflow.parallel.parallelize import Part, moe_layers, parallelize
from moeflow.parallel.state import Placements, model_tensors
from moeflow.parallel.topology import Topology
from moeflow.schema import ParallelConfig

_MARK = "deepspeed_mark"


@dataclass(frozen=True)
class Spread:
    """A model whose experts are spread over the ranks.

    Attributes:
        part: this rank's part.
        topology: who is in which group.
    """

    part: Part
    topology: Topology

    def parameter_groups(self, **options: Any) -> list[dict[str, Any]]:
        """Parameter groups for a torch optimizer, the experts in a group of their own.

        Args:
            options: of both groups (`weight_decay=0.1`).
        """
        sharding, parameters = self.part.sharding, self.part.model.named_parameters()
        named = [(p, sharding[name].expert) for name, p in parameters if p.requires_grad]
        dense = {"params": [p for p, expert in named if not expert], "name": "dense", "moe": False, **options}
        experts = {"params": [p for p, expert in named if expert], "name": EXPERTS, "moe": True, **options}
        return [group for group in (dense, experts) if group["params"]]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers for torch.distributed.checkpoint, to save from and to load into.

        Returns:
            "model/NAME" -> tensor that shares the model's memory; experts are DTensors that know their place, so that
            any number of ranks loads them.
        """
        placements = Placements(self.topology, self.part.sharding, self.part.full_shapes)
        return model_tensors(self.part.model, placements)


def spread(model: nn.Module, ep: int, seed: int = 0, device: torch.device | str = "cpu") -> Spread:
    """Make a model this rank's part of the whole, ready for `deepspeed.initialize` with ZeRO 0, 1 or 2.

    Collective; to be called after `deepspeed.init_distributed`.

    Args:
        model: with `MoELayer`s, built under `torch.device("meta")`; changed in place.
        ep: ranks that the experts of one layer are spread over; divides the number of ranks and of experts.
        seed: decides the initial values, together with the parameters' names; the same on every number of ranks.
        device: where this rank's part lives.

    Raises:
        ConfigError: DeepSpeed is not installed, or `ep` does not divide the ranks or the experts.
    """
    device = torch.device(device)
    import_deepspeed(device)
    topology = Topology.create(ParallelConfig(ep=ep), timeout_s=600.0)
    part = parallelize(model, topology, seed, device)
    mark_experts(part)
    register_groups(topology)
    for layer in moe_layers(model).values():
        layer.add_module(_MARK, _mark(layer.num_experts))
    return Spread(part, topology)


def _mark(num_experts: int) -> nn.Module:
    """A module without parameters that DeepSpeed takes for an MoE layer of its own."""
    from deepspeed.moe.layer import MoE

    class Mark(MoE):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = num_experts

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """The groups are made already."""

        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            return iter(())

        @property
        def expert_group_name(self) -> NoReturn:
            # DeepSpeed asks when it saves or loads, and would leave out the experts of all ranks but the first.
            raise CheckpointError(
                "DeepSpeed's save_checkpoint and load_checkpoint know nothing of the experts of moeflow's layers",
                "torch.distributed.checkpoint.save(spread.tensors(), checkpoint_id=FOLDER)",
            )

    return Mark()
