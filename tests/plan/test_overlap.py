from __future__ import annotations

from dataclasses import replace

import pytest

from moeflow.plan.overlap import choose_chunks, pipelined_s
from moeflow.plan.profile import DEFAULTS

FREE = replace(DEFAULTS["a100"], chunk_s=0.0, overlap=1.0)


def test_one_chunk_is_the_plain_sum():
    assert pipelined_s(2.0, 3.0, 1) == pytest.approx(2 + 3 + 2)


def test_two_chunks_by_hand():
    # Sends end at 1 and 2; products run 1-2 and 2-3; returns 2-3 and 3-4.
    assert pipelined_s(2.0, 2.0, 2) == pytest.approx(4.0)
    # Bound by computation: send 1, compute 10, return 1.
    assert pipelined_s(2.0, 10.0, 2) == pytest.approx(12.0)
    # Bound by communication: the stream never rests, so both ways end to end.
    assert pipelined_s(10.0, 2.0, 2) == pytest.approx(20.0)


@pytest.mark.parametrize(("send", "compute"), [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)])
def test_free_chunks_approach_the_longer_of_the_two(send, compute):
    times = [pipelined_s(send, compute, n) for n in range(1, 65)]
    assert min(times) >= max(2 * send, compute) * (1 - 1e-9)
    assert times[-1] == pytest.approx(max(2 * send, compute), rel=0.05)


def test_chunks_pay_where_both_are_of_one_size():
    choice = choose_chunks(DEFAULTS["a100"], send_s=1e-3, compute_s=2e-3)
    assert choice.chunks > 1
    assert choice.plain_s / choice.chunked_s > 1.2


def test_chunks_stay_away_where_they_cannot_gain():
    assert choose_chunks(DEFAULTS["a100"], send_s=1e-6, compute_s=1e-2).chunks == 1
    assert choose_chunks(DEFAULTS["a100"], send_s=1e-5, compute_s=1e-5).chunks == 1, "a chunk costs more than it hides"
    assert choose_chunks(replace(FREE, overlap=0.0), send_s=1.0, compute_s=2.0).chunks == 1, "nothing runs side by side"


def test_fixed_parts_and_latency_hold_the_number_down():
    free = choose_chunks(FREE, 1.0, 2.0, max_chunks=16)
    fixed = choose_chunks(FREE, 1.0, 2.0, fixed_s=0.4, max_chunks=16)
    late = choose_chunks(FREE, 1.0, 2.0, latency_s=0.3, max_chunks=16)
    assert free.chunks == 16
    assert fixed.chunks < 16 and late.chunks < 16
    assert fixed.chunked_s > free.chunked_s
