"""Small convolutional network with MoE blocks.

Legend: B images, C channels, H height, W width, D model (channels of a token), F ffn.

    image [B, 3, 32, 32] -> stem -> blocks -> maximum over the positions -> norm -> head -> logits

Each position of a feature map is a token of the MoE blocks.  They stand where the map is small: there a token sees most
of the image, and the experts' cost is small beside that of the convolutions.  No norm looks at other samples, so a
model computes the same whatever the batch and however it is spread over processes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeflow.errors import ConfigError
from moeflow.models.tasks import ClassificationTask
from moeflow.moe import MoELayer
from moeflow.schema.gate import GateConfig
from moeflow.schema.model import ConvNetConfig

_GROUP_CHANNELS = 16
#: The stem halves 32x32, and so does each further stage.
_MOST_STAGES = 5


class Convolution(nn.Module):
    """norm -> activation -> 3x3 convolution.

    Args:
        c_in: channels of the input.
        c_out: channels of the output.
    """

    def __init__(self, c_in: int, c_out: int):
        super().__init__()
        self.norm = nn.GroupNorm(c_in // _GROUP_CHANNELS, c_in)
        self.activation = nn.SiLU()
        self.conv = nn.Conv2d(c_in, c_out, 3, padding=1, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map [B, c_in, H, W] to [B, c_out, H, W]."""
        return self.conv(self.activation(self.norm(x_BCHW)))


class Transition(nn.Module):
    """Convolution, then the maximum over each 2x2 square: from one stage to the next.

    A convolution of stride 2 would be cheaper, but learns much more slowly.

    Args:
        c_in: channels of the input.
        c_out: channels of the output.
    """

    def __init__(self, c_in: int, c_out: int):
        super().__init__()
        self.body = Convolution(c_in, c_out)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map [B, c_in, H, W] to [B, c_out, H // 2, W // 2]."""
        return functional.max_pool2d(self.body(x_BCHW), 2)


class ConvBlock(nn.Module):
    """x + convolution(x).

    Args:
        channels: C.
    """

    def __init__(self, channels: int):
        super().__init__()
        self.body = Convolution(channels, channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map [B, C, H, W] to the same shape."""
        return x_BCHW + self.body(x_BCHW)


class TokenBlock(nn.Module):
    """x + mlp(norm(x)) for each position of the map; the MLP is an MoE layer unless `num_experts` is 0.

    Args:
        d_model: D, channels.
        d_hidden: F, hidden width that a token passes through: of the dense MLP, or of its top_k experts together.
        num_experts: experts in all.
        gate: of the MoE layer; its top_k decides the width of one expert.
    """

    def __init__(self, d_model: int, d_hidden: int, num_experts: int, gate: GateConfig):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.mlp: nn.Module
        if num_experts:
            self.mlp = MoELayer(d_model, num_experts, math.ceil(d_hidden / gate.top_k), gate, activation="silu")
        else:
            self.mlp = nn.Sequential(nn.Linear(d_model, d_hidden), nn.SiLU(), nn.Linear(d_hidden, d_model))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Map [B, D, H, W] to the same shape."""
        x_BHWC = x_BCHW.permute(0, 2, 3, 1)  # contiguous, for the maps are channels_last
        return (x_BHWC + self.mlp(self.norm(x_BHWC))).permute(0, 3, 1, 2)


class ConvNet(nn.Module):
    """Convolutional network for images whose sides the strides divide (32x32 by default).

    Args:
        config: options.
        gate: of the MoE layers.

    Attributes:
        task: loss and metrics.

    Raises:
        ConfigError: options that do not fit together.
    """

    def __init__(self, config: ConvNetConfig, gate: GateConfig):
        super().__init__()
        _check(config)
        self.config = config
        self.task = ClassificationTask(config.label_smoothing)
        widths = config.widths
        self.stem = nn.Conv2d(3, widths[0], 4, stride=2, padding=1)
        blocks: list[nn.Module] = []
        for stage, width in enumerate(widths):
            if stage:
                blocks.append(Transition(widths[stage - 1], width))
            for _ in range(config.depths[stage]):
                blocks.append(ConvBlock(width))
                if stage in config.moe_stages:
                    blocks.append(TokenBlock(width, round(config.mlp_ratio * width), config.num_experts, gate))
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], config.num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Classify images.

        Args:
            inputs: [B, 3, H, W].

        Returns:
            Logits [B, classes].
        """
        # oneDNN and cuDNN keep this order from layer to layer; tokens then need no copy.
        x_BCHW = self.stem(inputs.contiguous(memory_format=torch.channels_last))
        for block in self.blocks.values():
            x_BCHW = block(x_BCHW)
        return self.head(self.norm(x_BCHW.amax((2, 3))))


def _check(config: ConvNetConfig) -> None:
    for width in config.widths:
        if width % _GROUP_CHANNELS:
            nearest = math.ceil(width / _GROUP_CHANNELS) * _GROUP_CHANNELS
            raise ConfigError(
                f"model.widths has {width}: widths must be multiples of {_GROUP_CHANNELS} (channels of a norm's group)",
                f"put {nearest} in its place",
            )
    if len(config.depths) != len(config.widths):
        raise ConfigError(
            f"model.depths={config.depths} has {len(config.depths)} entries and model.widths={config.widths} "
            f"{len(config.widths)}: each stage needs one of both"
        )
    if not 1 <= len(config.widths) <= _MOST_STAGES:
        raise ConfigError(
            f"model.widths={config.widths} has {len(config.widths)} stages: 1 to {_MOST_STAGES} of them halve an image "
            "of 32x32 down to one position at most",
            "as many entries in model.widths and model.depths",
        )
    for stage in config.moe_stages:
        if not 0 <= stage < len(config.widths):
            raise ConfigError(
                f"model.moe_stages has {stage}: stages are numbered 0 to {len(config.widths) - 1}, see model.widths"
            )
        if round(config.mlp_ratio * config.widths[stage]) < 1:
            raise ConfigError(
                f"model.mlp_ratio={config.mlp_ratio:g} times {config.widths[stage]} channels rounds to a hidden width "
                "of 0; at least 1 is needed",
                f"model.mlp_ratio={1 / config.widths[stage]:g} or more",
            )
