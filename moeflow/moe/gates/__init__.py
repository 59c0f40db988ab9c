"""Gates: which experts a token goes to, and with what weight.  One file a family.

To add one: a configuration class in `moeflow/schema/gate.py` (and its entry in GATES), a class here with its entry in
_CLASSES, and a file `configs/gate/NAME.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moeflow.errors import ConfigError, did_you_mean
from moeflow.moe.gates.aux_free import AuxFreeGate
from moeflow.moe.gates.base import Gate, GateOutput, TokenContext
from moeflow.moe.gates.cosine import CosineGate
from moeflow.moe.gates.expert_choice import ExpertChoiceGate
from moeflow.moe.gates.group_limited import GroupLimitedGate
from moeflow.moe.gates.gshard import GShardGate
from moeflow.moe.gates.hashing import HashGate
from moeflow.moe.gates.naive import NaiveGate
from moeflow.moe.gates.noisy import NoisyGate
from moeflow.moe.gates.sinkhorn import SinkhornGate
from moeflow.moe.gates.soft import SoftGate, SoftOutput
from moeflow.moe.gates.swipe import SwipeGate
from moeflow.moe.gates.switch import SwitchGate
from moeflow.moe.gates.topology import TopologyGate
from moeflow.moe.gates.zero import ZeroGate
from moeflow.schema.gate import GATES, GateConfig

_CLASSES: dict[str, type[Gate]] = {
    "naive": NaiveGate,
    "noisy": NoisyGate,
    "switch": SwitchGate,
    "gshard": GShardGate,
    "swipe": SwipeGate,
    "zero": ZeroGate,
    "cosine": CosineGate,
    "topology": TopologyGate,
    "expert_choice": ExpertChoiceGate,
    "sinkhorn": SinkhornGate,
    "hash": HashGate,
    "group_limited": GroupLimitedGate,
    "aux_free": AuxFreeGate,
    "soft": SoftGate,
}

__all__ = [
    "AuxFreeGate",
    "CosineGate",
    "ExpertChoiceGate",
    "GShardGate",
    "Gate",
    "GateOutput",
    "GroupLimitedGate",
    "HashGate",
    "NaiveGate",
    "NoisyGate",
    "SinkhornGate",
    "SoftGate",
    "SoftOutput",
    "SwipeGate",
    "SwitchGate",
    "TokenContext",
    "TopologyGate",
    "ZeroGate",
    "after_step",
    "build_gate",
]


def build_gate(gate: GateConfig | str, d_model: int, num_experts: int) -> Gate:
    """Build a gate from its configuration, or from its name with the defaults.

    Raises:
        ConfigError: no gate has that name, or its options do not fit the number of experts.
    """
    if isinstance(gate, str):
        if gate not in GATES:
            raise ConfigError(f"gate={gate!r}: no such gate; valid: {', '.join(GATES)}.{did_you_mean(gate, GATES)}")
        gate = GATES[gate]()
    return _CLASSES[gate.name](d_model, num_experts, gate)


@torch.no_grad()
def after_step(model: nn.Module, reduce: Callable[[Tensor], Tensor]) -> None:
    """Tell the gates of a model that an optimizer step is done, with the load it saw on all ranks.

    To be called once after each optimizer step, on every rank; it costs one collective, and none where no gate needs
    the load.

    Args:
        model: with MoE layers.
        reduce: sums an int64 tensor over all ranks that hold tokens for these layers (those of the pipeline stage).
    """
    gates = [gate for gate in model.modules() if isinstance(gate, Gate) and gate.counts_E is not None]
    if not gates:
        return
    counts = reduce(torch.cat([gate.counts_E for gate in gates]))  # type: ignore[misc]
    for gate, counts_E in zip(gates, counts.split([gate.num_experts for gate in gates]), strict=True):
        gate.after_step(counts_E)
