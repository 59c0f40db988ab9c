"""An MoE model in a script for Accelerate: nothing of it is special.

    accelerate launch docs/examples/accelerate_moe.py
    accelerate launch --multi_gpu --num_processes 2 docs/examples/accelerate_moe.py

Accelerate wraps the model in DistributedDataParallel, so every process holds all experts and their gradients are
averaged like all others.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from moeflow import MoELayer


def main() -> None:
    """Fit a function of eight numbers."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), MoELayer(32, num_experts=8, d_hidden=64), nn.Linear(32, 1))
    x = torch.randn(4096, 8)
    loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {accelerator.gather(loss.detach()).mean().item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
