"""Exchange in chunks: rows of one chunk of experts travel while another chunk is computed, forward and backward.

A chunk is a few of the experts of every rank.  All sends are started at once, chunk by chunk; then each chunk is
awaited, computed, and started on its way home (the schedule of FasterMoE: He et al., PPoPP 2022, section 5, with chunks
of experts in place of its groups of workers).  Five small autograd functions make up the trip:

    depart -> arrive, experts, leave (for each chunk) -> home

None of them computes, and where one starts a transfer in the forward pass, it awaits one in the backward pass.
Autograd runs the newest ready function first, so the backward pass gets the mirrored schedule by itself: `home` starts
the gradients of all chunks, and each chunk is awaited, computed and started on its way back.

Every row meets the same products in the same order as without chunks, so the results are the same.

Legend: R rows, D model, W ranks of the group, L experts of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from moeflow.moe import Experts
from moeflow.parallel import collectives
from moeflow.parallel.topology import Group

#: Rows of one chunk, ordered by source and then by expert; local experts [first, last + 1) of it; a function from rows
#: ordered by expert and int64 [chunk] rows of each to the experts' outputs.  Returns outputs in the order of the rows.
Compute = Callable[[Tensor, tuple[int, int], Callable[[Tensor, Tensor], Tensor]], Tensor]


def cut(num_local: int, chunks: int) -> list[tuple[int, int]]:
    """Local experts [first, last + 1) of each chunk, as even as can be; never more chunks than experts."""
    chunks = max(1, min(chunks, num_local))
    ends = [num_local * (chunk + 1) // chunks for chunk in range(chunks)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def run_chunked(
    experts: Experts,
    rows_RD: Tensor,
    sent: list[list[int]],
    arrived: list[list[int]],
    chunks: Sequence[tuple[int, int]],
    group: Group,
    compute: Compute,
) -> Tensor:
    """Rows to their experts, through them, and back.

    Args:
        experts: of this rank; their parameters are stacked.
        rows_RD: [R, D], ordered by rank and then by expert.
        sent: for each rank, rows for each of its experts.
        arrived: for each rank, rows from it for each local expert.
        chunks: from `cut`.
        group: of the ranks.
        compute: runs one chunk that has arrived.

    Returns:
        [R, O] in the order of `rows_RD`.
    """
    trip = _Trip(group, sent, arrived, chunks)
    parts = _pieces(experts, chunks)
    tokens = _Depart.apply(rows_RD, trip)
    homeward = []
    for chunk, (first, last) in enumerate(chunks):

        def of_chunk(rows: Tensor, counts: Tensor, chunk: int = chunk) -> Tensor:
            return functional_call(experts, parts[chunk], (rows, counts))

        rows = _Arrive.apply(tokens[chunk], trip, chunk)
        out = compute(rows, (first, last), of_chunk)
        homeward.append(_Leave.apply(out, trip, chunk))
    return _Home.apply(trip, *homeward)


def _pieces(experts: nn.Module, chunks: Sequence[tuple[int, int]]) -> list[dict[str, Tensor]]:
    """Parameters of each chunk: views, whose gradients are put together once."""
    lengths = [last - first for first, last in chunks]
    pieces: list[dict[str, Tensor]] = [{} for _ in chunks]
    for name, parameter in experts.named_parameters():
        for piece, part in zip(pieces, parameter.split(lengths), strict=True):
            piece[name] = part
    return pieces


class _Trip:
    """What the functions of one trip share: sizes, buffers, transfers under way.

    At home rows stand by rank and then by expert; away, those of a chunk stand by source and then by expert.
    """

    def __init__(
        self, group: Group, sent: list[list[int]], arrived: list[list[int]], chunks: Sequence[tuple[int, int]]
    ):
        self.group, self.num_chunks = group, len(chunks)
        ends = [0, *accumulate(count for row in sent for count in row)]
        local = len(sent[0])
        self.num_rows = ends[-1]
        # Of each chunk and rank: the block at home.
        self.home = [[(ends[w * local + lo], ends[w * local + hi]) for w in range(group.size)] for lo, hi in chunks]
        sizes = [[sum(row[lo:hi]) for row in arrived] for lo, hi in chunks]
        self.away = [list(zip([0, *accumulate(of)], accumulate(of), strict=False)) for of in sizes]
        self.num_away = [sum(of) for of in sizes]
        self.pending: list[collectives.Pending | None] = [None] * self.num_chunks
        self.buffers: list[Tensor | None] = [None] * self.num_chunks
        self.at_home: Tensor | None = None

    def send_away(self, rows_RD: Tensor, chunk: int) -> None:
        """Start a chunk's rows on their way to the experts."""
        buffer = rows_RD.new_empty(self.num_away[chunk], *rows_RD.shape[1:])
        self.buffers[chunk] = buffer
        self._start(chunk, rows_RD, self.home[chunk], buffer, self.away[chunk])

    def arrive(self, chunk: int) -> Tensor:
        """Await a chunk's rows at the experts."""
        buffer = self._await(chunk)
        self.buffers[chunk] = None
        assert buffer is not None
        return buffer

    def send_home(self, rows_RD: Tensor, chunk: int) -> None:
        """Start a chunk's rows on their way back."""
        if self.at_home is None:
            self.at_home = rows_RD.new_empty(self.num_rows, *rows_RD.shape[1:])
        self._start(chunk, rows_RD, self.away[chunk], self.at_home, self.home[chunk])

    def come_home(self) -> Tensor:
        """Await all chunks at home."""
        for chunk in range(self.num_chunks):
            self._await(chunk)
        rows, self.at_home = self.at_home, None
        assert rows is not None
        return rows

    def _start(
        self,
        chunk: int,
        source: Tensor,
        outgoing: Sequence[tuple[int, int]],
        target: Tensor,
        incoming: Sequence[tuple[int, int]],
    ) -> None:
        own = self.group.rank
        others = [rank for rank in range(self.group.size) if rank != own]
        self.pending[chunk] = collectives.start(
            {rank: source[slice(*outgoing[rank])] for rank in others},
            {rank: target[slice(*incoming[rank])] for rank in others},
            self.group,
            chunk,
        )
        target[slice(*incoming[own])].copy_(source[slice(*outgoing[own])])

    def _await(self, chunk: int) -> Tensor | None:
        pending, self.pending[chunk] = self.pending[chunk], None
        assert pending is not None, "a transfer is awaited once"
        pending.wait()
        return self.buffers[chunk]


def _token(like: Tensor, rows: int, width: Sequence[int]) -> Tensor:
    """Stands in the graph for rows that are under way; has their shape and no memory."""
    return like.new_empty(()).expand(rows, *width)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, trip: _Trip) -> tuple[Tensor, ...]:
        ctx.trip = trip
        rows_RD = rows_RD.contiguous()
        for chunk in range(trip.num_chunks):
            trip.send_away(rows_RD, chunk)
        return tuple(_token(rows_RD, trip.num_away[chunk], rows_RD.shape[1:]) for chunk in range(trip.num_chunks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.trip.come_home(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, trip: _Trip, chunk: int) -> Tensor:
        ctx.trip, ctx.chunk = trip, chunk
        return trip.arrive(chunk)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.trip.send_home(grad.contiguous(), ctx.chunk)
        return _token(grad, *_shape(grad)), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip, chunk: int) -> Tensor:
        ctx.trip, ctx.chunk = trip, chunk
        trip.send_home(rows.contiguous(), chunk)
        return _token(rows, *_shape(rows))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.trip.arrive(ctx.chunk), None, None


class _Home(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trip: _Trip, *tokens: Tensor) -> Tensor:
        ctx.trip = trip
        return trip.come_home()

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> Any:
        trip, grad_RO = ctx.trip, grad_RO.contiguous()
        # In the order in which they will be awaited.
        for chunk in reversed(range(trip.num_chunks)):
            trip.send_away(grad_RO, chunk)
        width = grad_RO.shape[1:]
        return None, *(_token(grad_RO, trip.num_away[chunk], width) for chunk in range(trip.num_chunks))


def _shape(rows: Tensor) -> tuple[int, torch.Size]:
    return rows.shape[0], rows.shape[1:]
