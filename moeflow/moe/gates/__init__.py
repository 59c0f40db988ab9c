"""Gates: which experts a token goes to, and with what weight.  One file a family.

To add one: a configuration class in `moeflow/schema/gate.py` (and its entry in GATES), a class here with its entry in
_CLASSES, and a file `configs/gate/NAME.yaml`.
"""

from __future__ import annotations

from moeflow.errors import ConfigError, did_you_mean
from moeflow.moe.gates.base import Gate, GateOutput, TokenContext
from moeflow.moe.gates.gshard import GShardGate
from moeflow.moe.gates.naive import NaiveGate
from moeflow.moe.gates.noisy import NoisyGate
from moeflow.moe.gates.switch import SwitchGate
from moeflow.schema.gate import GATES, GateConfig

_CLASSES: dict[str, type[Gate]] = {
    "naive": NaiveGate,
    "noisy": NoisyGate,
    "switch": SwitchGate,
    "gshard": GShardGate,
}

__all__ = ["GShardGate", "Gate", "GateOutput", "NaiveGate", "NoisyGate", "SwitchGate", "TokenContext", "build_gate"]


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
