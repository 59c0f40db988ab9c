"""The naive gate, and the options that every gate has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeflow.errors import ConfigError
from moeflow.moe import MoELayer
from moeflow.moe.gates import Gate, TokenContext, build_gate
from moeflow.schema.gate import NaiveGateConfig
from tests.moe.gates.statement import CASES, balance, check_numerically, choose, compare, linear, make, rows, softmax, z


def naive(gate: Gate, x: Tensor):
    config = gate.config
    logits = linear(gate, x)
    if config.score == "softmax":
        probs = scores = [softmax(row) for row in logits]
    else:
        scores = [1 / (1 + (-row).exp()) for row in logits]
        probs = [row / row.sum() for row in scores]
    ids = [choose(row, config.top_k) for row in scores]
    weights = [scores[t][chosen] for t, chosen in enumerate(ids)]
    if config.renormalize == "before":
        weights = [w / w.sum() for w in weights]
    losses = {}
    if gate.training and config.load_balance_coef:
        losses["load_balance"] = balance(probs, ids, gate.num_experts, config.top_k)
    if gate.training and config.z_loss_coef:
        losses["z"] = z(logits)
    return ids, rows(weights, config.top_k) * config.scaling, losses


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("case", CASES)
def test_formula(case: str, top_k: int):
    gate, x = make("naive", case, top_k=top_k, z_loss_coef=0.1)
    compare(gate, x, naive)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("renormalize", "scaling"), [("before", 1.0), ("none", 1.0), ("before", 2.5), ("none", 0.5)])
def test_scores_normalization_and_scaling(score: str, renormalize: str, scaling: float):
    gate, x = make("naive", score=score, renormalize=renormalize, scaling=scaling, bias=True, z_loss_coef=1.0)
    compare(gate, x, naive)
    check_numerically(gate, x)


def test_gradients_numerically():
    check_numerically(*make("naive", "skewed", z_loss_coef=0.1))


def test_evaluation_has_no_losses():
    gate, x = make("naive", z_loss_coef=1.0)
    assert compare(gate.eval(), x, naive).losses == {}


def test_softmax_over_the_chosen_logits_is_the_normalized_softmax():
    gate, x = make("naive")
    out = gate(x)
    logits = x @ gate.proj.weight.t()
    torch.testing.assert_close(out.weights_TK, torch.softmax(logits.gather(1, out.ids_TK), 1))


# --- load-balance loss over sequences and over accumulated micro-batches ---------------------------------------------


def test_sequence_scope_is_the_mean_over_sequences():
    gate, x = make("naive", num_tokens=12, load_balance_scope="sequence")

    def by_sequence(gate: Gate, x: Tensor):
        ids, weights, _ = naive(gate, x)
        parts = [naive(gate, x[i : i + 4])[2]["load_balance"] for i in (0, 4, 8)]
        return ids, weights, {"load_balance": sum(parts) / 3}

    compare(gate, x, by_sequence, TokenContext(sequence_length=4))
    check_numerically(gate, x, TokenContext(sequence_length=4))


def test_sequence_scope_needs_sequences():
    gate, x = make("naive", load_balance_scope="sequence")
    with pytest.raises(ConfigError, match="do not come in sequences"):
        gate(x)


def test_global_scope_counts_all_micro_batches_since_the_step():
    from moeflow.moe.gates import after_step

    gate, x = make("naive", num_tokens=12, load_balance_scope="global")
    seen: list[list[int]] = []

    def statement(gate: Gate, x: Tensor):
        ids, weights, _ = naive(gate, x)
        seen.extend(ids)
        share = [sum(chosen.count(e) for chosen in seen) / (len(seen) * 2) for e in range(6)]
        mean = torch.stack([softmax(row) for row in linear(gate, x)]).mean(0)
        return ids, weights, {"load_balance": 6 * sum(f * p for f, p in zip(share, mean))}

    for start in (0, 4, 8):
        compare(gate, x[start : start + 4], statement)
    after_step(gate, lambda counts: counts)
    seen.clear()
    compare(gate, x[:4], statement)


# --- mask ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["batch", "sequence", "global"])
def test_masked_tokens_count_in_no_loss(scope: str):
    gate, x = make("naive", num_tokens=12, load_balance_scope=scope, z_loss_coef=1.0)
    valid = torch.tensor([True, False, True, True] * 3)
    whole = gate(x, TokenContext(sequence_length=4, valid_T=valid))
    if gate.counts_E is not None:
        gate.counts_E.zero_()
    only = gate(x[valid], TokenContext(sequence_length=3))
    assert (whole.ids_TK[~valid] == -1).all()
    assert torch.equal(whole.ids_TK[valid], only.ids_TK)
    for name in ("load_balance", "z"):
        torch.testing.assert_close(whole.losses[name][1], only.losses[name][1])


def test_everything_masked():
    gate, x = make("naive", z_loss_coef=1.0)
    out = gate(x, TokenContext(valid_T=torch.zeros(len(x), dtype=torch.bool)))
    assert (out.ids_TK == -1).all()
    assert all(loss == 0 for _, loss in out.losses.values())


# --- capacity, freezing, rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "training", "expected"),
    [
        ({}, True, None),
        ({"capacity_factor": 1.0}, True, 4),
        ({"capacity_factor": 1.0}, False, 4),
        ({"capacity_factor": 1.0, "eval_capacity_factor": 2.0}, False, 8),
        ({"eval_capacity_factor": 2.0}, False, 8),
        ({"eval_capacity_factor": 2.0}, True, None),
        ({"capacity_factor": 0.1, "min_capacity": 3}, True, 3),
        ({"capacity_factor": 0.1, "min_capacity": 300}, True, 12),
    ],
)
def test_capacity(options: dict, training: bool, expected: int | None):
    gate, _ = make("naive", **options)
    assert gate.train(training).capacity(12) == expected


def test_renormalize_after_spreads_the_weight_over_what_is_kept():
    gate, x = make("naive", renormalize="after", capacity_factor=0.5, scaling=3.0, num_tokens=40)
    out = gate(x)
    probs = torch.softmax(x @ gate.proj.weight.t(), 1)
    torch.testing.assert_close(out.weights_TK, probs.gather(1, out.ids_TK))
    kept = torch.where(torch.rand(40, 2) < 0.5, out.ids_TK, -1)
    weights = gate.reweigh(out.weights_TK, kept)
    for t in range(40):
        sum_kept = sum(probs[t, e] for e in kept[t].tolist() if e >= 0)
        for k, e in enumerate(kept[t].tolist()):
            expected = 3.0 * probs[t, e] / sum_kept if e >= 0 else torch.zeros(())
            torch.testing.assert_close(weights[t, k].double(), expected.double())


def test_frozen_gate_has_no_trainable_parameters():
    layer = MoELayer(4, 4, 8, NaiveGateConfig(frozen=True, bias=True))
    assert not any(p.requires_grad for p in layer.gate.parameters())
    layer(torch.randn(5, 4)).sum().backward()
    assert all(p.grad is None for p in layer.gate.parameters())
    assert layer.experts.w_in.grad is not None


def test_fp32_gate_of_a_half_model():
    gate = build_gate("naive", 8, 4).bfloat16()
    out = gate(torch.randn(6, 8).bfloat16())
    assert out.weights_TK.dtype == out.probs_TE.dtype == torch.float32


def test_more_choices_than_experts():
    with pytest.raises(ConfigError, match=r"between 1 and model.num_experts=2"):
        build_gate(NaiveGateConfig(top_k=3), 4, 2)


def test_padding_needs_a_capacity():
    with pytest.raises(ConfigError, match="pad_to_capacity"):
        build_gate(NaiveGateConfig(pad_to_capacity=True), 4, 2)
