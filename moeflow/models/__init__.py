"""Models, built as if they were alone in the world; `moeflow.parallel` makes a rank's part of them.

To add one: a configuration class in `moeflow/schema/model.py` (and its entry in MODELS), a module here with its entry
in _BUILDERS, and a file `configs/model/NAME.yaml`.
"""

from __future__ import annotations

import importlib

from torch import nn

from moeflow.errors import ConfigError, did_you_mean
from moeflow.schema import GateConfig, ModelConfig

# name -> (module, class); the class takes (ModelConfig, GateConfig) and has a `task`.
_BUILDERS = {
    "convnet": ("moeflow.models.convnet", "ConvNet"),
    "lenet": ("moeflow.models.lenet", "LeNet"),
    "gpt": ("moeflow.models.transformer", "GPT"),
}


def build_model(config: ModelConfig, gate: GateConfig) -> nn.Module:
    """Build a model on the current default device.

    Under `torch.device("meta")` it takes no memory; `moeflow.parallel.parallelize` gives this rank's part its values.

    Returns:
        A module that maps a batch's inputs to logits, with an attribute `task` (loss and metrics of the logits).

    Raises:
        ConfigError: there is no model of that name, or its options do not fit together.
    """
    if config.name not in _BUILDERS:
        raise ConfigError(
            f"model.name={config.name!r}: no such model; valid: {', '.join(_BUILDERS)}."
            f"{did_you_mean(config.name, _BUILDERS)}"
        )
    module, name = _BUILDERS[config.name]
    return getattr(importlib.import_module(module), name)(config, gate)
