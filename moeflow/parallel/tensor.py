"""Tensor parallelism of the dense part of a model.

A model tells which of its modules can be cut, by `tensor_regions()` (see `moeflow.models.regions`), without knowing of
ranks.  Here the parameters of those modules become this rank's slices, and the region's borders get the communication,
as forward hooks, so that neither names nor the model's code change.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moeflow.errors import ConfigError
from moeflow.models.regions import Region, VocabularyRegion
from moeflow.parallel import regions
from moeflow.parallel.sharding import TENSOR_DIMS
from moeflow.parallel.topology import Group
from moeflow.parallel.vocabulary import VocabularyCrossEntropy, vocabulary_embedding


def cut_plan(model: Any, tp: Group) -> dict[str, dict[str, int]]:
    """Which leaf modules of the model are cut: name -> parameter -> dimension.

    Raises:
        ConfigError: the model cannot be cut, or a size does not divide.
    """
    if tp.size == 1:
        return {}
    if not hasattr(model, "tensor_regions"):
        raise ConfigError(
            f"parallel.tp={tp.size}: {type(model).__name__} has no part that tensor parallelism could cut",
            "parallel.tp=1 (parallel.ep and parallel.etp spread its experts)",
        )
    plan: dict[str, dict[str, int]] = {}
    for region in model.tensor_regions():
        if isinstance(region, VocabularyRegion):
            plan[region.module] = {"weight": 0}
            continue
        for key, count in region.divides.items():
            if count % tp.size:
                raise ConfigError(
                    f"parallel.tp={tp.size} does not divide {key}={count}", f"parallel.tp=1, or another {key}"
                )
        plan.update({f"{region.module}.{name}": {"weight": 0, "bias": 0} for name in region.columns})
        plan.update({f"{region.module}.{name}": {"weight": 1} for name in region.rows})
    return plan


def cut_leaf(leaf: nn.Module, dims: dict[str, int], tp: Group) -> None:
    """Replace the parameters of a leaf module, whole and with values, by this rank's slices."""
    for name, dim in dims.items():
        whole = getattr(leaf, name, None)
        if whole is None:
            continue
        lo, hi = regions.part_bounds(whole.shape[dim], tp)
        setattr(leaf, name, nn.Parameter(whole.detach().narrow(dim, lo, hi - lo).clone(), whole.requires_grad))
    setattr(leaf, TENSOR_DIMS, {name: dim for name, dim in dims.items() if getattr(leaf, name, None) is not None})
    if isinstance(leaf, nn.Linear):
        leaf.out_features, leaf.in_features = leaf.weight.shape


def connect_regions(model: Any, tp: Group, sequence_parallel: bool) -> None:
    """Give the borders of all regions their communication."""
    if tp.size == 1:
        return
    for region in model.tensor_regions():
        module = _find(model, region.module)
        if module is None:
            continue  # on another pipeline stage
        if isinstance(region, VocabularyRegion):
            _connect_vocabulary(model, module, region, tp, sequence_parallel)
        else:
            _connect(module, region, tp, sequence_parallel)


def _connect(module: nn.Module, region: Region, tp: Group, sequence_parallel: bool) -> None:
    def before(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (regions.enter(args[0], tp, sequence_parallel), *args[1:])

    def after(_module: nn.Module, _args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return regions.leave(output, tp, sequence_parallel)

    module.register_forward_pre_hook(before)
    if region.rows:
        module.register_forward_hook(after)


def _connect_vocabulary(model: Any, module: Any, region: VocabularyRegion, tp: Group, sequence_parallel: bool) -> None:
    if region.kind == "embedding":

        def embed(ids: Tensor) -> Tensor:
            part = vocabulary_embedding(ids, module.weight, region.size, tp)
            return regions.leave(part, tp, sequence_parallel)

        module.forward = embed
        return

    def before(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (regions.enter(args[0], tp, sequence_parallel),)

    module.register_forward_pre_hook(before)
    model.task.cross_entropy = VocabularyCrossEntropy(region.size, tp)


def _find(model: nn.Module, name: str) -> nn.Module | None:
    module: nn.Module | None = model
    for part in name.split("."):
        children = dict(module.named_children()) if module is not None else {}
        module = children.get(part)
    return module
