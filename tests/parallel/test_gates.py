"""Every gate on layouts of several ranks: outputs, losses and gradients of one process with the whole batch.

SWIPE and the topology-aware gate with a limit share out places among one rank's tokens, as capacity does, so they are
not here; neither is expert choice with a micro-batch as its pool.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from moeflow.moe import DenseMLP, MoELayer, SharedExperts
from moeflow.moe.gates import after_step
from moeflow.parallel import collectives
from moeflow.parallel.gradients import Gradients
from moeflow.parallel.parallelize import parallelize
from moeflow.parallel.topology import Topology
from moeflow.schema import GATES, ParallelConfig
from tests.distributed import run_ranks

B, S, D, E = 8, 4, 6, 4
DROPLESS = {"capacity_factor": None, "eval_capacity_factor": None}
GATES_TRIED = {
    "naive": {"z_loss_coef": 0.1},
    "naive, each sequence": {"load_balance_scope": "sequence"},
    "naive, all micro-batches": {"load_balance_scope": "global"},
    "naive, sigmoid": {"score": "sigmoid", "scaling": 2.0, "bias": True},
    "noisy": {"load_balance_coef": 0.1},
    "switch": {**DROPLESS, "jitter": 0.0},
    "gshard": {**DROPLESS, "random_second": False},
    "zero": {},
    "cosine": {"projection_dim": 5},
    "topology": {},
    "expert_choice": {"pool": "sequence"},
    "sinkhorn": {"top_k": 2, "load_balance_coef": 0.1},
    "hash": {"top_k": 2},
    "group_limited": {"num_groups": 2, "top_groups": 1},
    "aux_free": {"top_k": 1, "bias_update_rate": 0.1},
    "soft": {"slots_per_expert": 2},
}


class Net(nn.Module):
    def __init__(self, name: str, options: dict):
        super().__init__()
        gate = GATES[name](**options)
        self.moe = MoELayer(D, E, 7, gate, shared=SharedExperts(DenseMLP(D, 5), D, gated=True), mask_values={1: 0.5})

    def forward(self, x: Tensor, token_ids: Tensor, mask: Tensor) -> Tensor:
        return self.moe(x, token_ids, mask)


def one_step(parallel: dict, name: str, masked: bool) -> dict[str, Tensor]:
    """This rank's outputs and losses, and the reduced gradients of what it holds, by name."""
    topology = Topology.create(ParallelConfig(**parallel), 60.0)
    with torch.device("meta"):
        net = Net(name.partition(",")[0], GATES_TRIED[name])
    part = parallelize(net, topology, 0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    x, upstream = torch.randn(2, B, S, D, generator=generator)
    ids = torch.randint(0, 99, (B, S), generator=generator)
    mask = (torch.rand(B, S, generator=generator) < 0.3).long() * masked
    dp = topology["dp"]
    mine = slice(dp.rank * B // dp.size, (dp.rank + 1) * B // dp.size)
    # Noise that depends on the token, not on the rank.
    with mock.patch("torch.randn_like", lambda t: torch.sin(1e3 * t.detach())):
        y = net(x[mine], ids[mine], mask[mine])
    ((y * upstream[mine]).sum() * dp.size).backward()
    Gradients(net, topology, part.sharding).reduce()
    experts = net.moe.experts
    result = {f"grad {n}": p.grad for n, p in net.named_parameters()}
    result["y"], result["mine"] = y.detach(), torch.arange(B)[mine]
    result["first"], result["last"] = torch.tensor([experts.first_expert, experts.first_expert + experts.num_local])
    result |= {f"loss {n}": loss for n, loss in net.moe.last_stats.losses.items() if n != "z"}
    after_step(net, partial(collectives.all_reduce, group=topology["stage"]))
    if name == "aux_free":
        result["bias"] = net.moe.gate.selection_bias_E
    return result


def all_gates(parallel: dict, masked: bool) -> dict[str, dict[str, Tensor]]:
    return {name: one_step(parallel, name, masked) for name in GATES_TRIED}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "parallel", "masked"), [(2, {"ep": 2}, False), (2, {"ep": 2}, True), (4, {"ep": 2}, True)]
)
def test_every_gate_is_the_same_on_every_layout(world: int, parallel: dict, masked: bool):
    expected = all_gates({}, masked)
    ranks = run_ranks(all_gates, world, parallel, masked, timeout=100)
    for results in ranks:
        for name, result in results.items():
            assert set(result) == set(expected[name])
            for key, value in result.items():
                whole = expected[name][key]
                if key in ("mine", "first", "last"):
                    continue
                if key == "y":
                    whole = whole[result["mine"]]
                elif "moe.experts." in key:
                    whole = whole[result["first"] : result["last"]]
                elif name == "naive, each sequence" and "loss" in key:
                    # Of the own sequences: the mean over the ranks is that of the batch.
                    value = torch.stack([other[name][key] for other in ranks]).mean()
                torch.testing.assert_close(
                    value, whole, rtol=2e-5, atol=2e-6, msg=lambda text, n=name, k=key: f"{n}: {k}: {text}"
                )
