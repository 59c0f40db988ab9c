"""How each parameter is spread over the ranks; everything that treats parameters differently asks here.

shards    axis -> dimension that is cut over it: each rank holds a part of the values
only      axes of which one rank alone holds the parameter, and the others hold other ones (experts of several classes)
partial   axes over which the value is the same on every rank, but each rank's gradient is a part of the whole
expert    whether data parallelism of the experts (edp) applies, and not that of the dense part (dp)
counted   False for the second copy of a parameter that two pipeline stages share (a tied embedding and head): both
          hold it, their gradients are summed over the axis "ends", and the norm counts it once
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from moeflow.models.regions import PARTIAL
from moeflow.moe import Experts, MoELayer
from moeflow.parallel.topology import Topology

# Set on a leaf module whose parameters were cut over tp: parameter -> dimension.
TENSOR_DIMS = "tensor_parallel_dims"


@dataclass(frozen=True)
class ParameterSharding:
    """Of one parameter; see the top of the module.  Axes of size one are left out."""

    shards: Mapping[str, int] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    expert: bool = False
    counted: bool = True
    only: tuple[str, ...] = ()

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Axes over which the squares of a gradient have to be summed to see all of it, or all of its like."""
        return (*self.shards, *self.only)

    @property
    def data_axis(self) -> str:
        """Axis over which the value is replicated for the sake of more data."""
        return "edp" if self.expert else "dp"


Sharding = dict[str, ParameterSharding]


def describe_sharding(model: nn.Module, topology: Topology, sequence_parallel: bool = False) -> Sharding:
    """Tell the sharding of every parameter of this rank's part, by name.

    Args:
        model: after its modules were cut.
        topology: of this rank.
        sequence_parallel: whether the activations between tensor-parallel regions are cut over tp, so that whatever
            is replicated there sees a part of the tokens only.
    """
    sharding: Sharding = {}
    tp = topology["tp"].size
    for prefix, module in model.named_modules():
        dims = getattr(module, TENSOR_DIMS, {}) if tp > 1 else {}
        for name, _ in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if full in sharding:
                continue
            if name in dims:
                sharding[full] = ParameterSharding(shards={"tp": dims[name]})
            else:
                is_partial = tp > 1 and (sequence_parallel or getattr(module, PARTIAL, False))
                sharding[full] = ParameterSharding(partial=("tp",) if is_partial else ())
    for prefix, module in model.named_modules():
        if isinstance(module, MoELayer) and tp > 1:
            # Each tp rank routes its part of the tokens, so gradients of gate and shared experts are parts.
            for name, _ in module.named_parameters():
                sharding[f"{prefix}.{name}"] = ParameterSharding(partial=("tp",))
    for prefix, module in model.named_modules():
        if isinstance(module, Experts):
            own = describe_experts(module, topology["ep"].size, topology["etp"].size)
            sharding.update({f"{prefix}.{name}": s for name, s in own.items()})
    return {**sharding, **_tied_sharding(model, sharding, topology)}


def global_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Name of each parameter of this rank's part in the whole model.

    They differ for the second name of a shared parameter whose first one is on another stage.
    """
    present = set(names)
    tied = getattr(model, "tied", {})
    return {name: tied[name] if name in tied and tied[name] not in present else name for name in present}


def _tied_sharding(model: nn.Module, sharding: Sharding, topology: Topology) -> Sharding:
    if topology["pp"].size == 1:
        return {}
    changed: Sharding = {}
    for alias, original in getattr(model, "tied", {}).items():
        if original in sharding:
            changed[original] = replace(sharding[original], partial=(*sharding[original].partial, "ends"))
        elif alias in sharding:
            partial = (*sharding[alias].partial, "ends")
            changed[alias] = replace(sharding[alias], partial=partial, counted=False)
    return changed


def describe_experts(experts: Experts, ep: int, etp: int) -> Sharding:
    """Sharding of the parameters of the experts of one layer, over ep and etp ranks."""
    hidden_dims = experts.hidden_dims()
    result: Sharding = {}
    for name, _ in experts.named_parameters():
        shards = {"ep": 0} if ep > 1 and experts.stacked else {}
        only = ("ep",) if ep > 1 and not experts.stacked else ()
        partial: tuple[str, ...] = ()
        if etp > 1 and name in hidden_dims:
            shards["etp"] = hidden_dims[name]
        elif etp > 1:
            partial = ("etp",)
        result[name] = ParameterSharding(shards, partial, expert=True, only=only)
    return result
