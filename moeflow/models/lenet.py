"""The network of FastMoE's multi-node tutorial: LeNet with an MoE layer in place of its first two full layers.

Legend: B images, C channels, H height, W width.

    image [B, 3, 32, 32] -> conv 5x5, 6 -> pool -> conv 5x5, 16 -> pool -> MoE layer 400 -> 84 -> head -> logits

An image is one token.  Each expert is the pair of layers that stood there, 400 -> 120 -> 84.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from moeflow.models.tasks import ClassificationTask
from moeflow.moe import MoELayer
from moeflow.schema.gate import GateConfig
from moeflow.schema.model import LeNetConfig

_FEATURES, _HIDDEN, _OUT = 16 * 5 * 5, 120, 84


class LeNet(nn.Module):
    """LeNet-5 (LeCun et al. 1998) for 32x32 color images, with ReLU, max-pooling and an MoE layer.

    Args:
        config: options; without experts the layer is one expert of top_k times the hidden width.
        gate: of the MoE layer.

    Attributes:
        task: loss and metrics.
    """

    def __init__(self, config: LeNetConfig, gate: GateConfig):
        super().__init__()
        self.config = config
        self.task = ClassificationTask()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.mlp: nn.Module
        if config.num_experts:
            self.mlp = MoELayer(_FEATURES, config.num_experts, _HIDDEN, gate, activation="relu", d_out=_OUT)
        else:
            hidden = gate.top_k * _HIDDEN
            self.mlp = nn.Sequential(nn.Linear(_FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, _OUT))
        self.head = nn.Linear(_OUT, config.num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Classify images [B, 3, 32, 32]; returns logits [B, classes]."""
        x_BCHW = functional.max_pool2d(functional.relu(self.conv1(inputs)), 2)
        x_BCHW = functional.max_pool2d(functional.relu(self.conv2(x_BCHW)), 2)
        return self.head(functional.relu(self.mlp(x_BCHW.flatten(1))))
