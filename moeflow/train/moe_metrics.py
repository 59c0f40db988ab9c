"""What the MoE layers of a model did in the last step, summed up over layers and ranks."""

from __future__ import annotations

import torch
from torch import nn

from moeflow.parallel import collectives
from moeflow.parallel.parallelize import moe_layers
from moeflow.parallel.topology import Topology


def moe_metrics(model: nn.Module, topology: Topology) -> dict[str, float]:
    """Means over the layers; every rank of a stage must call it.

    Returns:
        moe/imbalance: largest load of an expert over the mean load (1 is balanced).
        moe/dropped: share of the choices that were dropped.
        moe/dead: experts without a token, summed over the layers.
        moe/entropy: of the gate's probabilities, nats.
        moe/LOSS: auxiliary losses before their coefficients.
        Empty for a model without MoE layers.
    """
    stats = [layer.last_stats for layer in moe_layers(model).values() if layer.last_stats is not None]
    if not stats:
        return {}
    stage = topology["stage"]
    counts_LE = [collectives.all_reduce(s.tokens_per_expert_E.clone(), stage).double() for s in stats]
    dropped_L = collectives.all_reduce(torch.stack([s.num_dropped for s in stats]).double(), stage)
    totals_L = torch.stack([counts_E.sum() for counts_E in counts_LE]).clamp(min=1)
    imbalance_L = torch.stack([c.max() / c.mean().clamp(min=1e-9) for c in counts_LE])
    metrics = {
        "moe/imbalance": imbalance_L.mean().item(),
        "moe/dropped": (dropped_L / totals_L).mean().item(),
        "moe/dead": int(sum((c == 0).sum().item() for c in counts_LE)),
    }
    scalars = {"moe/entropy": [s.entropy for s in stats if s.entropy is not None]}
    for name in sorted({name for s in stats for name in s.losses}):
        scalars[f"moe/{name}"] = [s.losses[name] for s in stats if name in s.losses]
    for name, values in scalars.items():
        mean = torch.stack(values).double().mean()
        metrics[name] = (collectives.all_reduce(mean, stage) / stage.size).item()
    return metrics
