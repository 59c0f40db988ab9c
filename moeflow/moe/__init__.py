"""The MoE layer: gate -> plan -> dispatch -> experts -> combine, as a plain PyTorch module.

    layer.py        MoELayer, the token path from top to bottom
    gates/          one file a family of gates
    experts.py      the experts of one layer, stacked
    dispatcher.py   where rows go between dispatch and experts (nowhere, when alone)
    losses.py       load-balance, z, importance and load losses
    aux_loss.py     how an auxiliary loss reaches the backward pass
    stats.py        what a layer tells about its last forward pass
"""

from moeflow.moe.dispatcher import Dispatcher, LocalDispatcher
from moeflow.moe.experts import Experts, MLPExperts
from moeflow.moe.layer import MoELayer
from moeflow.moe.stats import MoEStats

__all__ = ["Dispatcher", "Experts", "LocalDispatcher", "MLPExperts", "MoELayer", "MoEStats"]
