"""The cosine router against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moeflow.models.init import initialize
from moeflow.moe.gates import Gate, build_gate
from moeflow.schema.gate import CosineGateConfig
from tests.moe.gates.statement import balance, check_numerically, choose, compare, make, rows, softmax


def cosine(gate: Gate, x: Tensor):
    inverse = gate.log_inverse_temperature.exp()
    limit = 1 / gate.config.min_temperature
    inverse = inverse if inverse.item() < limit else torch.tensor(limit, dtype=torch.float64)
    probs = []
    for row in x:
        p = gate.proj.weight @ row
        probs.append(softmax(torch.stack([inverse * (p @ e) / (p.norm() * e.norm()) for e in gate.embedding_EP])))
    ids = [choose(row, gate.top_k) for row in probs]
    weights = [p[chosen] / p[chosen].sum() for p, chosen in zip(probs, ids)]
    return ids, rows(weights, gate.top_k), {"load_balance": balance(probs, ids, gate.num_experts, gate.top_k)}


@pytest.mark.parametrize("temperature", [0.5, 0.05])
@pytest.mark.parametrize("case", ["random", "empty", "one token"])
def test_formula(case: str, temperature: float):
    gate, x = make("cosine", case, projection_dim=3, init_temperature=temperature)
    compare(gate, x, cosine)


def test_all_tokens_on_one_expert():
    gate, x = make("cosine", projection_dim=3, top_k=1)
    with torch.no_grad():
        gate.proj.weight.copy_(torch.eye(3, 5))
        gate.embedding_EP.copy_(-torch.ones(6, 3))
        gate.embedding_EP[4] = 1.0
    out = compare(gate, x.abs(), cosine)
    assert (out.ids_TK == 4).all()


def test_equal_embeddings_tie_for_the_lowest_expert():
    gate, x = make("cosine", projection_dim=3)
    with torch.no_grad():
        gate.embedding_EP.copy_(gate.embedding_EP[:1].expand(6, 3))
    assert gate(x).ids_TK.tolist() == [[0, 1]] * 13


def test_gradients_numerically():
    check_numerically(*make("cosine", projection_dim=3))


def test_temperature_is_bounded_below():
    gate, x = make("cosine", projection_dim=3, min_temperature=0.1)
    with torch.no_grad():
        gate.log_inverse_temperature.fill_(50.0)
    assert gate.logits(x).abs().max() <= 10 + 1e-9
    compare(gate, x, cosine)


def test_size_of_tokens_does_not_matter():
    gate, x = make("cosine", projection_dim=3)
    torch.testing.assert_close(gate.logits(x), gate.logits(7 * x))


def test_initial_values():
    gate = build_gate(CosineGateConfig(init_temperature=0.25), 32, 16)
    initialize(gate, 0)
    assert gate.log_inverse_temperature.item() == pytest.approx(math.log(4))
    assert gate.embedding_EP.std().item() == pytest.approx(0.01, rel=0.1)
    with torch.device("meta"):
        assert build_gate("cosine", 32, 16).embedding_EP.is_meta
