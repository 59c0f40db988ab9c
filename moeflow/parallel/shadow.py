"""Shadow experts: for one step every rank of the group holds some experts of others, and computes its own rows of them.

    forward     parameters   owner -> slices -> all ranks
    backward    gradients    all ranks -> slices, summed in rank order -> owner

One message holds the parameters of all shadowed experts.  It is cut into as many slices as there are ranks, so that
every link carries 2 (R-1)/R of it, whatever R is: a broadcast from the owner, or a reduction to it, would load that
rank's link R-1 times.  Where all owners have equally many of the shadowed experts, their parts are the slices, and the
first half of the way falls away: with all experts shadowed it is one all-gather and one reduce-scatter.

Legend: R rows, D model, O output width, L experts on this rank, S shadowed experts, N numbers, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moeflow.moe import Experts
from moeflow.moe.tree import Tree
from moeflow.parallel import collectives
from moeflow.parallel.topology import Group


@dataclass(frozen=True)
class Message:
    """Which ranks own which part of one message.

    Attributes:
        group: the ranks.
        slots: places of the shadowed experts, ascending: expert l of rank w has place w * local + l.
        local: L.
        numbers: of one expert.
    """

    group: Group
    slots: tuple[int, ...]
    local: int
    numbers: int

    @cached_property
    def parts(self) -> list[tuple[int, int]]:
        """First and last + 1 number of each owner's part."""
        ends, end = [], 0
        for rank in range(self.group.size):
            start, end = end, end + self.numbers * sum(slot // self.local == rank for slot in self.slots)
            ends.append((start, end))
        return ends

    @cached_property
    def slices(self) -> list[tuple[int, int]]:
        """First and last + 1 number of each slice; the last ones may be shorter, or empty."""
        total = len(self.slots) * self.numbers
        size = self.slice_size
        return [(min(rank * size, total), min((rank + 1) * size, total)) for rank in range(self.group.size)]

    @property
    def slice_size(self) -> int:
        """Numbers of the largest slice."""
        return math.ceil(len(self.slots) * self.numbers / self.group.size)

    @property
    def own(self) -> list[int]:
        """Numbers, on this rank, of its experts in the message."""
        return [slot % self.local for slot in self.slots if slot // self.local == self.group.rank]

    def sizes(self) -> tuple[list[int], list[int]]:
        """Numbers of this rank's part in each slice, and numbers of each part in this rank's slice."""
        rank = self.group.rank
        to = [_overlap(self.parts[rank], piece) for piece in self.slices]
        return to, [_overlap(part, self.slices[rank]) for part in self.parts]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def spread(own_N: Tensor, message: Message) -> Tensor:
    """Bring every owner's part of a message to all ranks of the group.

    Args:
        own_N: this rank's part; may be empty.
        message: who owns what.

    Returns:
        The whole message, [S * numbers].
    """
    to, of = message.sizes()
    if message.parts != message.slices:
        own_N = collectives.exchange(own_N, to, of, message.group)
    whole_N = collectives.all_gather_flat(_padded(own_N, message.slice_size), message.group)
    return whole_N[: len(message.slots) * message.numbers]


def collect(whole_N: Tensor, message: Message) -> Tensor:
    """Sum a message over all ranks, in rank order and in 32 bits, each owner getting its part.

    Args:
        whole_N: what this rank adds, [S * numbers].
        message: who owns what.
    """
    size, ranks = message.slice_size, message.group.size
    received = collectives.exchange(_padded(whole_N, ranks * size), [size] * ranks, [size] * ranks, message.group)
    first, *others = received.view(ranks, size)
    total_N = first.float() if first.dtype in (torch.bfloat16, torch.float16) else first.clone()
    for other in others:
        total_N += other
    lo, hi = message.slices[message.group.rank]
    total_N = total_N[: hi - lo].to(whole_N.dtype)
    to, of = message.sizes()
    return total_N if message.parts == message.slices else collectives.exchange(total_N, of, to, message.group)


def _padded(values_N: Tensor, size: int) -> Tensor:
    return values_N if len(values_N) == size else torch.cat([values_N, values_N.new_zeros(size - len(values_N))])


class _Shadows(torch.autograd.Function):
    """Stacked parameters of this rank's experts -> stacks of the shadowed experts; every rank must run both passes."""

    @staticmethod
    def forward(ctx: Any, message: Message, dtype: torch.dtype, *stacks: Tensor) -> tuple[Tensor, ...]:
        ctx.message, ctx.dtype = message, dtype
        ctx.like = [torch.empty_like(stack, device="meta") for stack in stacks]
        own = message.own
        own_N = torch.cat([stack[own].flatten(1).to(dtype) for stack in stacks], 1).flatten()
        return tuple(_unpacked(spread(own_N, message).view(len(message.slots), -1), stacks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        message, own = ctx.message, ctx.message.own
        packed = torch.cat([grad.flatten(1).to(ctx.dtype) for grad in grads], 1)
        total = collect(packed.flatten(), message).view(len(own), message.numbers)
        if not own:
            return (None, None, *(None for _ in grads))
        pieces = _unpacked(total, ctx.like)
        return (None, None, *(_into(like, own, piece) for like, piece in zip(ctx.like, pieces, strict=True)))


def _unpacked(packed: Tensor, stacks: Sequence[Tensor]) -> list[Tensor]:
    """[S, numbers] as one stack [S, ...] for each parameter."""
    parts = packed.split([stack[0].numel() for stack in stacks], 1)
    shaped = [
        part.unflatten(1, stack.shape[1:]) if stack.ndim > 1 else part[:, 0] for part, stack in zip(parts, stacks)
    ]
    # On CPUs experts are taken one by one, and each of them is contiguous.
    return shaped if packed.device.type == "cpu" else [piece.contiguous() for piece in shaped]


def _into(like: Tensor, own: list[int], piece: Tensor) -> Tensor:
    """A gradient of the whole stack from that of some of its experts."""
    if len(own) == len(like):
        return piece.to(like.dtype)
    grad = torch.zeros_like(like, device=piece.device)
    grad[own] = piece.to(like.dtype)
    return grad


def numbers_of(experts: Experts) -> int:
    """Numbers of one expert's parameters."""
    return sum(parameter[0].numel() for parameter in experts.parameters())


def compute_dtype(experts: Experts) -> torch.dtype:
    """What parameters are sent in: the dtype that autocast computes in, or their own."""
    first = next(experts.parameters())
    if torch.is_autocast_enabled(first.device.type):
        return torch.get_autocast_dtype(first.device.type)
    return first.dtype


def bring(experts: Experts, message: Message) -> dict[str, Tensor]:
    """Parameters of the shadowed experts on every rank, by name, stacked [S, ...]; differentiable, collective."""
    names, stacks = zip(*experts.named_parameters(), strict=True)
    return dict(zip(names, _Shadows.apply(message, compute_dtype(experts), *stacks), strict=True))


def run_shadows(experts: Experts, parameters: dict[str, Tensor], rows_RD: Tree, tokens_per_expert_S: Tensor) -> Tree:
    """Run rows through experts with other parameters.

    Args:
        experts: stacked ones.
        parameters: from `bring`.
        rows_RD: ordered by shadowed expert.
        tokens_per_expert_S: int64 [S].

    Returns:
        [R, O], in the same order.
    """
    with _of_size(experts, len(tokens_per_expert_S)):
        return torch.func.functional_call(experts, parameters, (rows_RD, tokens_per_expert_S))


@contextmanager
def _of_size(experts: Experts, size: int) -> Iterator[None]:
    """Let a forward pass that asks how many experts are here find those of the parameters it was given."""
    changed = [(module, module.num_local) for module in experts.modules() if isinstance(module, Experts)]
    for module, _ in changed:
        module.num_local = size
    try:
        yield
    finally:
        for module, before in changed:
            module.num_local = before
