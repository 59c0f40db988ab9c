"""Reduction of gradients over the ranks, and their global norm.

Each rank's loss is the mean over its own samples.  So, with dp the data-parallel size of the dense part:

    dense parameters    mean over the dp group
    expert parameters   sum over the edp group, divided by dp: an expert has already seen the tokens of its whole
                        expert-parallel group, and divided by edp its gradient would be ep times too large
    partial gradients   summed over the axes that hold the parts (tp for a gate, etp for an expert's output bias, the
                        first and last stage for tied embeddings)

The same rule stands in Megatron-LM and DeepSpeed (expert gradient scaling 1/dp).  Which ranks take part is decided by
the layout alone, never by which gradients exist here: a parameter without a gradient takes part with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moeflow.ops.phases import in_phase
from moeflow.parallel import collectives
from moeflow.parallel.sharding import ParameterSharding, Sharding
from moeflow.parallel.topology import Group, Topology

BUCKET_BYTES = 25 * 2**20


class Gradients:
    """The gradients of a model's trainable parameters, over all ranks.

    Args:
        model: this rank's part.
        topology: of this rank.
        sharding: of the model's parameters.
        expert_dp_comm: "dp" reduces expert gradients over the edp group; "world" averages them over every rank of the
            stage (FastMoE's "world": with ep > 1 this mixes different experts); "none" leaves them.
    """

    def __init__(self, model: nn.Module, topology: Topology, sharding: Sharding, expert_dp_comm: str = "dp"):
        self.topology = topology
        self.expert_dp_comm = expert_dp_comm
        self.parameters: list[tuple[nn.Parameter, ParameterSharding]] = [
            (p, sharding[name]) for name, p in model.named_parameters() if p.requires_grad
        ]

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce all gradients in place; to be called once per optimizer step, on every rank."""
        for parameter, _ in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for axis in ("tp", "etp"):
            self._sum_parts(axis)
        dense = [(p, s) for p, s in self.parameters if not s.expert]
        experts = _grads(p for p, s in self.parameters if s.expert)
        dp = self.topology["dp"].size
        # Buckets apart from those of shards, whose sizes may differ between tp ranks: the order in which an all-reduce
        # over more than two ranks adds depends on a value's place in the bucket, and replicas must stay bit-equal.
        reduce_flat(_grads(p for p, s in dense if not s.shards), self.topology["dp"], 1.0 / dp)
        reduce_flat(_grads(p for p, s in dense if s.shards), self.topology["dp"], 1.0 / dp)
        # Last, for the same reason: two ranks add alike in either order, whatever their stages' buckets hold beside it.
        self._sum_parts("ends")
        if self.expert_dp_comm == "world":
            reduce_flat(experts, self.topology["stage"], 1.0 / self.topology["stage"].size)
        else:
            reduce_flat(experts, self.topology["edp"] if self.expert_dp_comm == "dp" else None, 1.0 / dp)

    def _sum_parts(self, axis: str) -> None:
        reduce_flat(_grads(p for p, s in self.parameters if axis in s.partial), self.topology[axis])

    @torch.no_grad()
    def norm(self) -> Tensor:
        """L2 norm of the gradient of the whole model, float32 0-dim, the same on every rank.

        A replicated gradient counts once, a sharded one with all its parts.
        """
        squares = torch.zeros((), dtype=torch.float64, device=self.parameters[0][0].device)
        # Fixed order of the kinds on all ranks: each takes part in the sums of its axes even without such parameters.
        for axes in ((), ("tp",), ("ep",), ("etp",), ("ep", "etp")):
            local = _sum_of_squares(
                _grads(p for p, s in self.parameters if s.counted and s.split_axes == axes), squares
            )
            for axis in axes:
                local = collectives.all_reduce(local, self.topology[axis])
            squares = squares + local
        squares = collectives.all_reduce(squares, self.topology["pp"])
        return squares.sqrt().float()

    @in_phase("optimizer")
    @torch.no_grad()
    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients by min(1, max_norm / norm): one coefficient on every rank."""
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(_grads(p for p, _ in self.parameters), coefficient)


def _grads(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Gradients of parameters; after `reduce` each of them has one."""
    return [p.grad for p in parameters if p.grad is not None]


def _sum_of_squares(grads: list[Tensor], like: Tensor) -> Tensor:
    # float64, so that the total does not depend on how the parameters are spread over ranks.
    return torch.stack(torch._foreach_norm(grads)).double().square().sum() if grads else torch.zeros_like(like)


def reduce_flat(grads: list[Tensor], group: Group | None, scale: float = 1.0) -> None:
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
