"""`fully_shard` of torch (FSDP2) on a model with MoE layers: losses and gradients of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moeflow import MoELayer
from tests.distributed import run_ranks

STEPS = 4


def _model(experts: str) -> nn.Module:
    torch.manual_seed(0)
    own = None if experts == "stacked" else (lambda width: nn.Linear(width, width))
    gate = "aux_free" if experts == "list" else "naive"
    return nn.Sequential(nn.Linear(6, 8), MoELayer(8, 4, 12, experts=own, gate=gate), nn.Linear(8, 3))


def _train(experts: str, shard: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _model(experts)
    rank, world = (dist.get_rank(), dist.get_world_size()) if shard else (0, 1)
    if shard:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
    # Left out, since in a plain script the load-balance loss is that of a rank's own tokens.
    model[1].gate.config.load_balance_coef = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        x, y = torch.randn(16, 6, generator=generator), torch.randint(0, 3, (16,), generator=generator)
        loss = nn.functional.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if shard:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    state = {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in model.named_parameters()}
    return losses, {name: value.detach().clone() for name, value in state.items()}


@pytest.mark.distributed
@pytest.mark.parametrize("experts", ["stacked", "list"])
def test_fully_shard_follows_one_process(experts):
    losses, alone = _train(experts, False)
    for other, parameters in run_ranks(_train, 2, experts, True, timeout=60):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(losses), rtol=1e-5, atol=0)
        for name, value in parameters.items():
            assert (value - alone[name]).norm() <= 1e-5 * alone[name].norm(), name
