"""Experts change their rank between two steps: parameters, and what the optimizer holds of them.

An order says which expert stands at which place: place w * L + l is the l-th expert of ep rank w.  "Home" is the
ascending order, in which checkpoints are written and read, so that they know of no placement.

Legend: E experts of the layer in all, L experts on this rank, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from moeflow.moe import Experts
from moeflow.parallel import collectives
from moeflow.parallel.topology import Group

Ints = NDArray[np.int64]


def order_of(owner_E: Ints, order_E: Ints, ranks: int) -> Ints:
    """The order in which every expert stands on its new rank, and those that stay keep their place.

    Args:
        owner_E: new rank of each expert; equally many on each.
        order_E: present order.
        ranks: W.
    """
    experts, local = len(order_E), len(order_E) // ranks
    new_E = np.full(experts, -1, dtype=np.int64)
    stays = owner_E[order_E] == np.arange(experts) // local
    new_E[stays] = order_E[stays]
    for rank in range(ranks):
        places = np.arange(rank * local, (rank + 1) * local)
        coming = sorted(set(np.flatnonzero(owner_E == rank).tolist()) - set(new_E[places].tolist()))
        new_E[places[new_E[places] < 0]] = coming
    return new_E


@torch.no_grad()
def move_experts(experts: Experts, optimizer: Optimizer | None, old_E: Ints, new_E: Ints, ep: Group) -> None:
    """Bring the experts of one layer from one order into another, in place; every rank of the group calls it.

    Args:
        experts: stacked ones, of this rank.
        optimizer: whose state of them goes along; None where there is none.
        old_E: present order.
        new_E: order wanted.
        ep: the ranks.
    """
    was = np.argsort(old_E)[new_E]  # place that each place's new expert comes from
    changed = np.flatnonzero(was != np.arange(len(was)))
    if not len(changed):
        return
    local = len(old_E) // ep.size
    pairs = [(int(was[place]), int(place)) for place in changed]
    going = sorted((pair for pair in pairs if pair[0] // local == ep.rank), key=lambda pair: pair[1])
    coming = sorted((pair for pair in pairs if pair[1] // local == ep.rank), key=lambda p: (p[0] // local, p[1]))
    send = np.bincount([new // local for _, new in going], minlength=ep.size).tolist()
    receive = np.bincount([old // local for old, _ in coming], minlength=ep.size).tolist()
    for tensor in _tensors(experts, optimizer):
        # One tensor at a time, so that the messages take little memory.
        parts = tensor[[old % local for old, _ in going]]
        tensor[[new % local for _, new in coming]] = collectives.exchange(parts, send, receive, ep)


def _tensors(experts: Experts, optimizer: Optimizer | None) -> Iterator[Tensor]:
    """All that holds one entry for each expert, in the same order on every rank."""
    for parameter in experts.parameters():
        yield parameter
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        yield from (state[key] for key in sorted(state) if _is_like(state[key], parameter))


def _is_like(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def places_of(order_E: Ints, device: torch.device) -> Tensor | None:
    """Place of each expert, [E + 1], the last entry for choices that were dropped (-1); None at home."""
    if (order_E == np.arange(len(order_E))).all():
        return None
    return torch.tensor([*np.argsort(order_E).tolist(), -1], device=device)
