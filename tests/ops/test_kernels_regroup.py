"""The order of rows around an all-to-all: the CUDA source, run on the host, against lists."""

from __future__ import annotations

import pytest
import torch

from moeflow.ops import kernel_calls
from moeflow.ops._cupy import KernelError
from tests.cuda_host.fake_cupy import with_engine
from tests.cuda_host.host import HostError
from tests.cuda_host.memory import Arena

# (ranks, local experts, highest count, row length, dtype, pointer offset in bytes)
CASES = [
    (1, 1, 5, 8, torch.float32, 0),
    (2, 3, 4, 5, torch.bfloat16, 0),
    (4, 2, 7, 64, torch.bfloat16, 0),
    (3, 5, 3, 33, torch.float32, 4),
    (8, 1, 4, 12, torch.float16, 8),
    (2, 2, 0, 16, torch.float32, 0),
    (16, 32, 2, 6, torch.int64, 0),
    (64, 64, 1, 2, torch.float32, 0),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "P{}-E{}-n{}-D{}-{}-off{}".format(*c))
def test_regroup(case, monkeypatch):
    num_ranks, num_experts, highest, width, dtype, offset = case
    arena = Arena(side="start" if num_ranks % 2 else "end", offset=offset)
    with_engine(monkeypatch, arena)
    generator = torch.Generator().manual_seed(num_ranks)
    counts = torch.randint(highest + 1, (num_ranks, num_experts), generator=generator)
    counts[:, 0] *= num_ranks % 2  # an expert that nobody chose
    rows = torch.randint(-1000, 1000, (int(counts.sum()), width), generator=generator).to(dtype)
    segments = dict(
        zip(
            [(r, e) for r in range(num_ranks) for e in range(num_experts)],
            rows.split(counts.flatten().tolist()),
            strict=True,
        )
    )
    want = torch.cat([segments[r, e] for e in range(num_experts) for r in range(num_ranks)])

    counts_g = arena.put(counts, "counts")
    got = kernel_calls.regroup(arena.put(rows, "rows"), counts_g)
    assert torch.equal(got, want)
    assert torch.equal(kernel_calls.regroup(got, counts_g, inverse=True), rows)


def test_counts_that_do_not_fit_are_noticed(monkeypatch):
    arena = Arena()
    with_engine(monkeypatch, arena)
    rows = arena.put(torch.randn(5, 4))
    with pytest.raises(HostError, match="do not add up"):
        kernel_calls.regroup(rows, arena.put(torch.tensor([[1, 1], [1, 1]])))
    with pytest.raises(KernelError, match="4160 segments"):
        kernel_calls.regroup(rows, arena.put(torch.zeros(65, 64, dtype=torch.int64)))
