"""One rank of a DeepSpeed-MoE training that saves its checkpoint, and what the trained network makes of an input."""

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, ep):
        super().__init__()
        self.first = nn.Linear(6, 8)
        options = {"num_experts": 4, "ep_size": ep, "k": 2, "capacity_factor": 4.0, "eval_capacity_factor": 8.0}
        options |= {"top2_2nd_expert_sampling": False}  # it draws the second expert in evaluation too
        self.plain = MoE(8, Expert(), drop_tokens=False, **options)
        self.residual = MoE(8, Expert(), use_residual=True, drop_tokens=False, **options)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.residual(self.plain(self.first(x))[0])[0])


def main(folder, stage):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = Net(int(os.environ["WORLD_SIZE"]))
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(net.parameters()), "name": "all"})
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "steps_per_print": 1000}
    engine = deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)[0]
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 6)).square().mean())
        engine.step()
    engine.save_checkpoint(folder, tag="global_step3")
    engine.eval()
    torch.manual_seed(5)
    x = torch.randn(16, 6)
    y = engine(x).detach()
    if engine.global_rank == 0:
        torch.save({"x": x, "y": y}, f"{folder}/io.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
