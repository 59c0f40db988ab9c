"""The MoE layer: gate -> plan -> dispatch -> experts -> combine, as a plain PyTorch module.

layer.py            MoELayer, the token path from top to bottom
gates/              one file a family of gates
experts.py          the experts of one layer, stacked MLPs
module_experts.py   experts of a user's own classes
grouped_linear.py   one linear map for each expert, to build experts of
shared.py           experts that every token passes through
dispatcher.py       where rows go between dispatch and experts (nowhere, when alone)
losses.py           load-balance, z, importance and load losses
aux_loss.py         how an auxiliary loss reaches the backward pass
stats.py            what a layer tells about its last forward pass
tree.py             inputs of several tensors
"""

from moeflow.moe.dispatcher import Dispatcher, LocalDispatcher
from moeflow.moe.experts import Experts, MLPExperts
from moeflow.moe.grouped_linear import GroupedLinear
from moeflow.moe.layer import MoELayer
from moeflow.moe.module_experts import ListExperts, ModuleExperts
from moeflow.moe.shared import DenseMLP, ResidualExperts, SharedExperts
from moeflow.moe.stats import MoEStats

__all__ = [
    "DenseMLP",
    "Dispatcher",
    "Experts",
    "GroupedLinear",
    "ListExperts",
    "LocalDispatcher",
    "MLPExperts",
    "MoELayer",
    "MoEStats",
    "ModuleExperts",
    "ResidualExperts",
    "SharedExperts",
]
