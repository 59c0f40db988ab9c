"""Reduction of gradients over the ranks, and their global norm.

Each rank's loss is the mean over its own samples.  So, with dp the data-parallel size of the dense part:

    dense parameters    mean over the dp group
    expert parameters   sum over the edp group, divided by dp: an expert has already seen the tokens of its whole
                        expert-parallel group, and divided by edp alone its gradient would be ep times too large

The same rule stands in Megatron-LM and DeepSpeed (expert gradient scaling 1/dp).  Which ranks take part is decided by
the groups alone, never by which gradients exist here: a parameter without a gradient takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moeflow.parallel import collectives
from moeflow.parallel.parallelize import expert_parameter_names
from moeflow.parallel.topology import Group, Topology

BUCKET_BYTES = 25 * 2**20


class Gradients:
    """The gradients of a model's trainable parameters, over all ranks.

    Args:
        model: this rank's part.
        topology: of this rank.
        expert_dp_comm: "dp" reduces expert gradients over the edp group; "world" averages them over every rank of the
            stage (FastMoE's "world": with ep > 1 this mixes different experts); "none" leaves them.
    """

    def __init__(self, model: nn.Module, topology: Topology, expert_dp_comm: str = "dp"):
        self.topology = topology
        expert_names = expert_parameter_names(model)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.dense = [p for name, p in named if name not in expert_names]
        self.experts = [p for name, p in named if name in expert_names]
        self.expert_dp_comm = expert_dp_comm

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce all gradients in place; to be called once per optimizer step, on every rank."""
        for parameter in (*self.dense, *self.experts):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        dp = self.topology["dp"].size
        _reduce([p.grad for p in self.dense], self.topology["dp"], 1.0 / dp)
        if self.expert_dp_comm == "world":
            stage = self.topology["stage"]
            _reduce([p.grad for p in self.experts], stage, 1.0 / stage.size)
        else:
            group = self.topology["edp"] if self.expert_dp_comm == "dp" else None
            _reduce([p.grad for p in self.experts], group, 1.0 / dp)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """L2 norm of the gradient of the whole model, float32 0-dim, the same on every rank.

        Dense gradients count once, expert gradients once for each rank of the expert-parallel group.
        """
        dense = _sum_of_squares(p.grad for p in self.dense)
        experts = _sum_of_squares(p.grad for p in self.experts)
        device = self.dense[0].device if self.dense else self.experts[0].device
        squares = torch.stack([dense.to(device), experts.to(device)])
        # Experts are summed over ep; every rank takes part, with or without experts of its own.
        squares[1:] = collectives.all_reduce(squares[1:].clone(), self.topology["ep"])
        return squares.sum().sqrt().float()

    @torch.no_grad()
    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients by min(1, max_norm / norm): one coefficient on every rank."""
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        grads = [p.grad for p in (*self.dense, *self.experts)]
        torch._foreach_mul_(grads, coefficient)


def _sum_of_squares(grads: Iterable[Tensor | None]) -> Tensor:
    norms = torch._foreach_norm([g for g in grads if g is not None])
    # float64, so that the total does not depend on how the parameters are spread over ranks.
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)


def _reduce(grads: list[Tensor], group: Group | None, scale: float) -> None:
    """Sum over the group and scale, in place, a bucket at a time."""
    if not grads or (scale == 1.0 and (group is None or group.size == 1)):
        return
    if group is None or group.size == 1:
        torch._foreach_mul_(grads, scale)
        return
    for bucket in _buckets(grads):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        collectives.all_reduce(flat, group).mul_(scale)
        parts = flat.split([grad.numel() for grad in bucket])
        torch._foreach_copy_(bucket, [part.view_as(grad) for part, grad in zip(parts, bucket, strict=True)])


def _buckets(grads: list[Tensor]) -> Iterable[list[Tensor]]:
    """Consecutive gradients of one dtype, up to BUCKET_BYTES together."""
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        nbytes = grad.numel() * grad.element_size()
        if bucket and (size + nbytes > BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += nbytes
    if bucket:
        yield bucket
