"""Experts spread over the ranks in a DeepSpeed script: ZeRO-2, two ranks for the experts of each layer.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 docs/examples/deepspeed_moe.py       on CPUs
    deepspeed docs/examples/deepspeed_moe.py                                            on GPUs

`spread` makes the model this rank's part, with values that do not depend on the number of ranks, and marks the experts
as DeepSpeed wants them.  The rest is an ordinary script.
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from moeflow import MoELayer
from moeflow.compat.deepspeed_moe import spread

CONFIG = {
    "train_batch_size": 64,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
    "steps_per_print": None,
}


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
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(get_accelerator().current_device_name())
    with torch.device("meta"):
        model = Block()
    experts = spread(model, ep=min(world, 2), seed=0, device=device)
    optimizer = torch.optim.AdamW(experts.parameter_groups(), lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        batch = torch.randn(64, 8, generator=generator)  # the same on all ranks, of which each takes its share
        x = batch.chunk(world)[rank].to(device)
        loss = nn.functional.mse_loss(engine(x), x.sin().sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        if step % 20 == 19:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item() / world:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
