"""Into how many chunks to cut an exchange so that computation of one chunk runs while another one is on its way.

The schedule is FasterMoE's (PPoPP 2022, section 5): all sends are queued on one communication stream, each chunk's
computation follows its arrival, and its return follows its computation.  The time of a cut is played through, not
approximated, since the ends of the pipeline matter most where there are few chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.plan.profile import Profile


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """Chunks and what they are predicted to bring.

    Attributes:
        chunks: 1 is the plain path.
        plain_s: seconds of the plain path.
        chunked_s: seconds with these chunks.
    """

    chunks: int
    plain_s: float
    chunked_s: float


def pipelined_s(
    send_s: float, compute_s: float, chunks: int, chunk_s: float = 0.0, overlap: float = 1.0, fixed_s: float = 0.0
) -> float:
    """Seconds of send, compute and return of one pass, cut into chunks.

    Args:
        send_s: of the whole exchange one way; the way back takes as long.
        compute_s: of the whole computation.
        chunks: 1 or more.
        chunk_s: added to each chunk's computation and to both of its exchanges where there are several.
        overlap: share of an exchange that does not disturb the computation beside it.
        fixed_s: part of `compute_s` that each chunk pays whole (launches, half-filled products).
    """
    extra = chunk_s if chunks > 1 else 0.0
    wire = send_s / chunks + extra
    work = (compute_s - fixed_s) / chunks + fixed_s + extra
    if chunks > 1:
        # What communication takes away from computation while both run.
        busy = min(2 * send_s * (chunks - 1) / chunks, compute_s)
        work += (1.0 - overlap) * busy / chunks
    arrived = computed = 0.0
    done = []
    for _ in range(chunks):
        arrived += wire
        computed = max(arrived, computed) + work
        done.append(computed)
    stream = arrived
    for ready in done:
        stream = max(stream, ready) + wire
    return stream


def choose_chunks(
    profile: Profile,
    send_s: float,
    compute_s: float,
    fixed_s: float = 0.0,
    max_chunks: int = 8,
    margin: float = 0.03,
    latency_s: float = 0.0,
) -> ChunkChoice:
    """The number of chunks that is predicted to be fastest; 1 unless another one gains `margin`.

    Args:
        profile: its `chunk_s` and `overlap`.
        send_s: seconds of one all-to-all of all rows.
        compute_s: seconds of the experts in the same pass (forward, or backward).
        fixed_s: part of `compute_s` that does not shrink with the rows.
        max_chunks: most chunks (peer groups, or experts of a rank).
        margin: share of the plain time that chunks must gain.
        latency_s: part of `send_s` that each chunk pays whole.
    """
    plain = pipelined_s(send_s, compute_s, 1)
    best, least = 1, plain * (1.0 - margin)
    for chunks in range(2, max_chunks + 1):
        time = pipelined_s(
            max(0.0, send_s - latency_s), compute_s, chunks, profile.chunk_s + latency_s, profile.overlap, fixed_s
        )
        if time < least:
            best, least = chunks, time
    return ChunkChoice(best, plain, plain if best == 1 else least)
