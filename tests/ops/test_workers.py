"""Experts side by side, one a core: the same results, errors that come through, and processes that fork."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from moeflow import ops
from moeflow.ops import workers


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_pieces_are_shared_out_evenly_or_not_at_all():
    found = workers.shares([5, 4, 3, 3, 2, 1], 2)
    assert sorted(piece for own in found for piece in own) == list(range(6))
    costs = [[[5, 4, 3, 3, 2, 1][i] for i in own] for own in found]
    assert [sum(own) for own in costs] == [9, 9]
    assert workers.shares([100, 1, 1, 1], 2) is None  # one hot expert: all cores on it
    assert workers.shares([1, 1, 1], 2) is None  # too few
    assert workers.shares([1] * 8, 1) is None
    assert workers.shares([], 2) is None


def test_workers_compute_on_one_core_and_the_caller_keeps_its_threads(two_threads):
    seen = {}
    workers.run(lambda piece, thread: seen.__setitem__(piece, (thread, torch.get_num_threads())), [[0, 2], [1, 3]])
    assert seen == {0: (0, 1), 2: (0, 1), 1: (1, 1), 3: (1, 1)}
    assert torch.get_num_threads() == 2
    fresh = []
    thread = threading.Thread(target=lambda: fresh.append((torch.ones(2).sum(), torch.get_num_threads())[1]))
    thread.start()
    thread.join()
    assert fresh == [2]


def test_errors_come_through(two_threads):
    def fail(piece: int, thread: int) -> None:
        if piece == 1:
            raise ValueError("piece 1")

    with pytest.raises(ValueError, match="piece 1"):
        workers.run(fail, [[0], [1]])


def _mlp(activation: str, bias: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).div(3).requires_grad_()

    counts = torch.tensor([6, 7, 6, 0, 7, 13])
    halves = (2,) if activation == "swiglu" else ()
    inputs = [draw(39, 12), draw(6, *halves, 10, 12), draw(6, *halves, 10), draw(6, 5, 10), draw(6, 5)]
    rows, w_in, b_in, w_out, b_out = inputs
    out = ops.grouped_mlp(rows, counts, w_in, b_in if bias else None, w_out, b_out if bias else None, activation)
    upstream = torch.randn(out.shape, generator=generator)
    used = inputs if bias else [rows, w_in, w_out]
    return [out, *torch.autograd.grad(out, used, upstream)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_side_by_side_equals_one_after_another(activation, bias, two_threads, monkeypatch):
    used = []
    run = workers.run
    monkeypatch.setattr(workers, "run", lambda *arguments: (used.append(1), run(*arguments)))
    together = _mlp(activation, bias)
    assert len(used) == 2  # forward and backward
    assert all(torch.equal(a, b) for a, b in zip(together, _mlp(activation, bias), strict=True))
    monkeypatch.setattr(workers, "shares", lambda *arguments: None)
    for got, want in zip(together, _mlp(activation, bias), strict=True):
        torch.testing.assert_close(got, want)


def test_a_forked_process_starts_threads_of_its_own(two_threads):
    _mlp("relu", True)
    child = os.fork()
    if child == 0:
        # torch's own OpenMP threads do not come along either: one core, by hand.
        workers.run(lambda piece, thread: None, [[0], [1]])
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0
