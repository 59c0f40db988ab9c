"""Whole parameters from the pieces that the ranks of a group hold, and back, one tensor at a time.

ZeRO cuts one flat vector of many parameters into equal pieces, so a piece begins and ends in the middle of a parameter.
A checkpoint wants whole ones.  Each parameter has an owner, the rank whose piece holds its first value: only the owner
ever holds it whole, so that every rank holds about its share.  Parameters inside one piece need no communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moeflow.parallel.topology import Group


@dataclass(frozen=True)
class Span:
    """Where one parameter lies in the flat vector of its group.

    Attributes:
        name: of the parameter.
        shape: of the parameter on this rank, before the flat vector was cut.
        start: of its first value in the flat vector.
        size: its values.
    """

    name: str
    shape: torch.Size
    start: int
    size: int


class Fragments:
    """The pieces of one flat vector over the ranks of a group.

    Args:
        group: ranks that hold a piece each, in order.
        piece: values of each piece.
        spans: parameters, in an order that is the same on all ranks.
    """

    def __init__(self, group: Group, piece: int, spans: list[Span]):
        self.group, self.piece, self.spans = group, piece, spans

    def owner(self, span: Span) -> int:
        """Group rank that holds the whole parameter in a checkpoint."""
        return span.start // self.piece

    def owned(self) -> list[Span]:
        """Parameters of this rank."""
        return [span for span in self.spans if self.owner(span) == self.group.rank]

    def _parts(self, span: Span) -> Iterator[tuple[int, slice, slice]]:
        """(group rank, values of the parameter, values of that rank's piece), by rank."""
        for rank in range(self.owner(span), self.group.size):
            first, end = max(span.start, rank * self.piece), min(span.start + span.size, (rank + 1) * self.piece)
            if first >= end:
                return
            shift = rank * self.piece
            yield rank, slice(first - span.start, end - span.start), slice(first - shift, end - shift)

    def gather(self, piece: Tensor) -> dict[str, Tensor]:
        """Whole tensors of the parameters that this rank owns, from everybody's piece; collective over the group."""
        whole: dict[str, Tensor] = {}
        for span in self.spans:
            owner, own = self.owner(span), self.group.rank
            if own == owner:
                whole[span.name] = torch.empty(span.size, dtype=piece.dtype, device=piece.device)
            for rank, there, here in self._parts(span):
                if own == owner == rank:
                    whole[span.name][there] = piece[here]
                elif own == owner:
                    part = torch.empty(there.stop - there.start, dtype=piece.dtype, device=piece.device)
                    dist.recv(part, src=self.group.ranks[rank], group=self.group.process_group)
                    whole[span.name][there] = part
                elif own == rank:
                    dist.send(piece[here].contiguous(), dst=self.group.ranks[owner], group=self.group.process_group)
            if own == owner:
                whole[span.name] = whole[span.name].view(span.shape)
        return whole

    def scatter(self, whole: dict[str, Tensor], piece: Tensor) -> None:
        """Fill everybody's piece from the whole tensors of the owners; collective over the group."""
        for span in self.spans:
            owner, own = self.owner(span), self.group.rank
            flat = whole[span.name].reshape(-1) if own == owner else None
            for rank, there, here in self._parts(span):
                if flat is not None and rank == own:
                    piece[here] = flat[there]
                elif flat is not None:
                    dist.send(flat[there].contiguous(), dst=self.group.ranks[rank], group=self.group.process_group)
                elif own == rank:
                    part = torch.empty(here.stop - here.start, dtype=piece.dtype, device=piece.device)
                    dist.recv(part, src=self.group.ranks[owner], group=self.group.process_group)
                    piece[here] = part
