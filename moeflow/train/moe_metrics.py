"""What the MoE layers of a model did in the last step, summed up over layers and ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeflow.moe import MoEStats
from moeflow.parallel import collectives
from moeflow.parallel.parallelize import moe_layers
from moeflow.parallel.topology import Topology
from moeflow.train.expert_log import LayerLoad

#: Name of an MoE layer -> what its experts got in the last step, over all ranks, in the order of the layers.
Loads = dict[str, LayerLoad]


def moe_metrics(model: nn.Module, topology: Topology) -> tuple[dict[str, float], Loads]:
    """Means over the layers of the whole model, and the load of each expert; every rank must call it.

    Returns:
        moe/imbalance: largest load of an expert over the mean load (1 is balanced).
        moe/dropped: share of the choices that were dropped.
        moe/dead: experts without a token, summed over the layers.
        moe/entropy: of the gate's probabilities, nats.
        moe/LOSS: auxiliary losses before their coefficients.
        Both are empty for a model without MoE layers.
    """
    own = [
        (name, *_layer_metrics(layer.last_stats, topology))
        for name, layer in moe_layers(model).items()
        if layer.last_stats is not None
    ]
    layers = [layer for stage in collectives.gather_objects(own, topology["pp"]) for layer in stage]
    rows = [row for _, row, _ in layers]
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        metrics[f"moe/{name}"] = int(sum(values)) if name == "dead" else sum(values) / len(values)
    # With several stages on a rank the order of the ranks is not that of the layers.
    return metrics, dict(sorted(((name, load) for name, _, load in layers), key=lambda item: _places(item[0])))


def _places(name: str) -> list[tuple[int, str]]:
    """Sorts "blocks.10.moe" after "blocks.9.moe"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _layer_metrics(stats: MoEStats, topology: Topology) -> tuple[dict[str, float], LayerLoad]:
    """Metrics of one layer, and the load of each expert, over the ranks of its stage."""
    stage = topology["stage"]
    scalars = dict(sorted(stats.losses.items()))
    if stats.entropy is not None:
        scalars["entropy"] = stats.entropy
    counts_E = stats.tokens_per_expert_E.double()
    packed = torch.cat(
        [
            counts_E,
            stats.num_dropped.double().view(1),
            *(value.double().view(1) / stage.size for value in scalars.values()),
        ]
    )
    packed = collectives.all_reduce(packed, stage)
    counts_E, (dropped, *values) = packed[: counts_E.numel()], packed[counts_E.numel() :].tolist()
    metrics = {
        "imbalance": _ratio(counts_E.max(), counts_E.mean()),
        "dropped": dropped / max(counts_E.sum().item(), 1.0),
        "dead": (counts_E == 0).sum().item(),
        **dict(zip(scalars, values, strict=True)),
    }
    return metrics, LayerLoad(counts_E.long().tolist(), int(dropped), metrics.get("entropy"))


def _ratio(top: Tensor, bottom: Tensor) -> float:
    return top.item() / bottom.item() if bottom.item() else 1.0
