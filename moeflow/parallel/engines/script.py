"""Experts spread over the ranks in a DeepSpeed script of the user's own, with `deepspeed.initialize`.

DeepSpeed finds experts by three things: a module of its MoE class somewhere in the model, marks on the parameters, and
parameter groups of the optimizer.  `spread` gives it all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from moeflow.errors import CheckpointError
from moeflow.parallel.engines.deepspeed import EXPERTS, import_deepspeed, mark_experts, register_groups
from moeflow.parallel.parallelize import Part, moe_layers, parallelize
from moeflow.parallel.topology import Topology
from moeflow.schema import ParallelConfig

_MARK = "deepspeed_mark"


def spread(model: nn.Module, ep: int, seed: int = 0, device: torch.device | str = "cpu") -> Part:
    """Make a model this rank's part of the whole, ready for `deepspeed.initialize` with ZeRO 0, 1 or 2.

    Collective; to be called after `deepspeed.init_distributed`.

    Args:
        model: with `MoELayer`s, built under `torch.device("meta")`; changed in place.
        ep: ranks that the experts of one layer are spread over; divides the number of ranks and of experts.
        seed: decides the initial values, together with the parameters' names; the same on every number of ranks.
        device: where this rank's part lives.

    Returns:
        The part; `parameter_groups(part)` is what the optimizer is made of.

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
    return part


def parameter_groups(part: Part, **options: Any) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer, the experts in a group of their own.

    Args:
        part: from `spread`.
        options: of every group (`weight_decay=0.1`).
    """
    named = [(p, part.sharding[name].expert) for name, p in part.model.named_parameters() if p.requires_grad]
    dense = {"params": [p for p, expert in named if not expert], "name": "dense", "moe": False, **options}
    experts = {"params": [p for p, expert in named if expert], "name": EXPERTS, "moe": True, **options}
    return [group for group in (dense, experts) if group["params"]]


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
                "torch.distributed.checkpoint with moeflow.parallel.state.model_tensors (docs/engines.md)",
            )

    return Mark()
