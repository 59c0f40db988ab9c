"""What the MoE layers of a model did in the last step, summed up over layers and ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeflow.moe import MoEStats
from moeflow.parallel import collectives
from moeflow.parallel.parallelize import moe_layers
from moeflow.parallel.topology import Topology


def moe_metrics(model: nn.Module, topology: Topology) -> dict[str, float]:
    """Means over the layers of the whole model; every rank must call it.

    Returns:
        moe/imbalance: largest load of an expert over the mean load (1 is balanced).
        moe/dropped: share of the choices that were dropped.
        moe/dead: experts without a token, summed over the layers.
        moe/entropy: of the gate's probabilities, nats.
        moe/LOSS: auxiliary losses before their coefficients.
        Empty for a model without MoE layers.
    """
    rows = [
        _layer_metrics(layer.last_stats, topology)
        for layer in moe_layers(model).values()
        if layer.last_stats is not None
    ]
    rows = [row for stage in collectives.gather_objects(rows, topology["pp"]) for row in stage]
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        metrics[f"moe/{name}"] = int(sum(values)) if name == "dead" else sum(values) / len(values)
    return metrics


def _layer_metrics(stats: MoEStats, topology: Topology) -> dict[str, float]:
    """Of one layer, over the ranks of its stage."""
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
    return {
        "imbalance": _ratio(counts_E.max(), counts_E.mean()),
        "dropped": dropped / max(counts_E.sum().item(), 1.0),
        "dead": (counts_E == 0).sum().item(),
        **dict(zip(scalars, values, strict=True)),
    }


def _ratio(top: Tensor, bottom: Tensor) -> float:
    return top.item() / bottom.item() if bottom.item() else 1.0
