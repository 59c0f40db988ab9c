"""Models: one class an option of the `model` group.  `num_experts` is always the total of a layer, never per rank."""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.schema.fields import option


@dataclass(slots=True)
class ModelConfig:
    """What every model has.  `name` picks the class in `moeflow.models`."""

    name: str = option("convnet", "model class")
    num_experts: int = option(8, "experts of each MoE layer in all (0 makes the layer a plain MLP)", minimum=0)


@dataclass(slots=True)
class ConvNetConfig(ModelConfig):
    """Small convolutional network with MoE blocks, for 32x32 images."""

    name: str = option("convnet", "model class")
    num_classes: int = option(10, "classes", minimum=2)


@dataclass(slots=True)
class LeNetConfig(ModelConfig):
    """LeNet-style network of FastMoE's multi-node tutorial: two 5x5 convolutions, an MoE layer 400 -> 84, a classifier."""

    name: str = option("lenet", "model class")
    num_experts: int = option(64, "experts of the MoE layer in all (32 on each of 2 workers)", minimum=0)
    num_classes: int = option(10, "classes", minimum=2)


MODELS: dict[str, type[ModelConfig]] = {"convnet": ConvNetConfig, "lenet": LeNetConfig}
