"""A small network with an MoE layer, trained on one process or many: what the tests of layouts compare."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from moeflow.moe import MoELayer
from moeflow.parallel import collectives
from moeflow.parallel.gradients import Gradients
from moeflow.parallel.parallelize import parallelize
from moeflow.parallel.state import Placements, model_tensors
from moeflow.parallel.topology import Topology
from moeflow.schema import GATES, OptimConfig, ParallelConfig
from moeflow.train.optim import build_optimizer

STEPS, BATCH = 20, 16


class Gated(nn.Module):
    """An expert of another class, with a parameter of a shape of its own."""

    def __init__(self, width: int):
        super().__init__()
        self.scale, self.inner = nn.Linear(width, 1), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return torch.sigmoid(self.scale(x)) * self.inner(x)


def narrow(width: int) -> nn.Module:
    """An expert of a third class."""
    return nn.Sequential(nn.Linear(width, 6), nn.GELU(), nn.Linear(6, width))


# With ep=4 the ranks hold experts of different classes.
MIXED = [Gated, narrow, partial(nn.Linear, out_features=16), Gated]


class Net(nn.Module):
    def __init__(self, gate: str, experts: str | None = None, **options):
        super().__init__()
        self.inner = nn.Linear(8, 16)
        config = GATES[gate](**options)
        activation = "swiglu" if gate == "naive" else "gelu"
        own = {None: None, "mixed": MIXED, "modules": Gated}[experts]
        self.moe = MoELayer(16, 4, 32, gate=config, activation=activation, experts=own)
        self.outer = nn.Linear(16, 3)

    def tensor_regions(self) -> list:
        """Nothing of the dense part is cut; the MoE layer's tokens are shared out."""
        return []

    def forward(self, x):
        h = self.inner(x)
        return self.outer(h + self.moe(h))


def train(
    parallel: dict, gate: str = "naive", options: dict | None = None, clip: float = 0.5, seed: int = 0
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train STEPS steps in this process's place of the layout.

    Returns:
        losses over the whole batch, gradient norms, and the whole parameters by name.
    """
    topology = Topology.create(ParallelConfig(**parallel), 60.0)
    with torch.device("meta"):
        net = Net(gate, **(options or {}))
    part = parallelize(net, topology, seed, torch.device("cpu"))
    optimizer = build_optimizer(net, OptimConfig(lr=1e-2))
    gradients = Gradients(net, topology, part.sharding)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, BATCH, 8, generator=generator)
    targets = torch.randint(0, 3, (STEPS, BATCH), generator=generator)
    dp = topology["dp"]
    losses, norms = [], []
    for step in range(STEPS):
        x, y = inputs[step][dp.rank :: dp.size], targets[step][dp.rank :: dp.size]
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        gradients.reduce()
        norm = gradients.norm()
        gradients.clip(clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(collectives.all_reduce(loss.detach().clone(), dp).item() / dp.size)
        norms.append(norm.item())
    placements = Placements(topology, part.sharding, part.full_shapes)
    whole = {
        name: t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
        for name, t in model_tensors(net, placements).items()
    }
    return losses, norms, whole
