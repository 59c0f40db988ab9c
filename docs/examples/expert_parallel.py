"""Experts spread over the ranks in a plain training loop, without the trainer.

    torchrun --nproc-per-node 2 docs/examples/expert_parallel.py

The model is built on the meta device, as if it were alone.  `parallelize` makes it this rank's part, with values that
do not depend on the number of ranks; `Gradients` reduces dense gradients over all ranks and each expert's where it
lives.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import nn

from moeflow import MoELayer
from moeflow.parallel.gradients import Gradients
from moeflow.parallel.parallelize import parallelize
from moeflow.parallel.topology import Topology
from moeflow.schema import ParallelConfig


class Block(nn.Module):
    """A residual MoE layer between two linear maps."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 1)
        self.moe = MoELayer(32, num_experts=8, d_hidden=64, gate="naive")

    def forward(self, x):
        h = self.inner(x)
        return self.outer(h + self.moe(h))


def main() -> None:
    """Fit a function of eight numbers."""
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=datetime.timedelta(seconds=60))
    topology = Topology.create(ParallelConfig(ep=dist.get_world_size()), timeout_s=60.0)
    device = torch.device("cuda", topology.rank % torch.cuda.device_count()) if use_cuda else torch.device("cpu")
    with torch.device("meta"):
        model = Block()
    part = parallelize(model, topology, seed=0, device=device)
    gradients = Gradients(model, topology, part.sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        batch = torch.randn(64, 8, generator=generator)  # the same on all ranks, of which each takes its share
        x = batch.chunk(topology["dp"].size)[topology["dp"].rank].to(device)
        loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        loss.backward()
        gradients.reduce()
        gradients.clip(1.0, gradients.norm())
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            dist.all_reduce(loss.detach_())
            if topology.is_main:
                print(f"step {step + 1}: loss {loss.item() / dist.get_world_size():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
