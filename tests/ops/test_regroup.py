"""Rows by expert instead of by source, and back: against a sort."""

from __future__ import annotations

import pytest
import torch

from moeflow import ops
from moeflow.ops.regroup import expert_major

COUNTS = [
    [[1, 2], [1, 1]],
    [[0, 0, 0], [0, 0, 0]],
    [[3, 0, 2], [0, 4, 1], [2, 2, 0]],
    [[5]],
    [[2, 0, 3]],
    [[2], [0], [3]],
]


@pytest.mark.parametrize("counts", COUNTS)
def test_order_and_gradient_against_a_sort(counts):
    table = torch.tensor(counts)
    labels = [(expert, source) for source, row in enumerate(counts) for expert, n in enumerate(row) for _ in range(n)]
    expected = sorted(range(len(labels)), key=lambda i: labels[i])
    assert expert_major(table).tolist() == expected
    rows = torch.randn(len(labels), 3, dtype=torch.float64, requires_grad=True)
    out = ops.regroup(rows, table)
    assert torch.equal(out, rows[expected])
    assert torch.equal(ops.regroup(out, table, inverse=True), rows)
    for inverse in (False, True):
        assert torch.autograd.gradcheck(lambda r, inverse=inverse: ops.regroup(r, table, inverse), rows)


def test_opcheck():
    table = torch.tensor([[1, 2], [1, 1]])
    rows = torch.randn(5, 3, requires_grad=True)
    for inverse in (False, True):
        torch.library.opcheck(torch.ops.moeflow.regroup.default, (rows, table, inverse))
