"""The gate as one operator: against plain autograd, on the kernels, and in the gates that use it."""

from __future__ import annotations

import pytest
import torch

from moeflow import ops
from moeflow.moe import MoELayer
from moeflow.schema.gate import (
    AuxFreeGateConfig,
    GroupLimitedGateConfig,
    GShardGateConfig,
    NaiveGateConfig,
    NoisyGateConfig,
    SinkhornGateConfig,
    SwitchGateConfig,
)
from tests.cuda_host.fake_cupy import ops_on_kernels

BIAS = torch.tensor([0.5, 0.0, -0.5, 0.2, 0.0, 0.1])


def losses(scores, weights, which: str) -> torch.Tensor:
    """A loss of the scores, of the weights, or of both."""
    terms = {"scores": scores.square().sum(), "weights": (weights * torch.arange(1.0, 3)).sum()}
    return sum(terms[name] for name in (terms if which == "both" else (which,)))


@pytest.mark.parametrize("which", ["scores", "weights", "both"])
@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("backend", ["torch", "kernels"])
def test_gate_and_gradient(backend, score, bias, which, monkeypatch):
    logits = torch.randn(17, 6, generator=torch.Generator().manual_seed(0))
    wide = logits.double().requires_grad_()
    scores = wide.softmax(1) if score == "softmax" else wide.sigmoid()
    ids = (scores if bias is None else scores + bias).topk(2, 1).indices
    losses(scores, scores.gather(1, ids), which).backward()
    if backend == "kernels":
        run = ops_on_kernels(monkeypatch)
    own = logits.clone().requires_grad_()
    made = ops.gate(own, 2, score, bias)
    losses(made.scores_TE, made.weights_TK, which).backward()
    assert torch.equal(made.ids_TK, ids)
    assert made.counts_E.tolist() == torch.bincount(ids.flatten(), minlength=6).tolist()
    torch.testing.assert_close(made.scores_TE, scores.float())
    torch.testing.assert_close(own.grad, wide.grad.float(), rtol=1e-5, atol=1e-6)
    if backend == "kernels":
        assert [name.split("<")[0] for name in run.cupy.launches] == ["moeflow::gate_forward", "moeflow::gate_backward"]


def test_opcheck():
    logits = torch.randn(5, 6, requires_grad=True)
    torch.library.opcheck(torch.ops.moeflow.gate.default, (logits, 2, "softmax", None))


GATES = {
    "naive": (NaiveGateConfig(), True),
    "sigmoid": (NaiveGateConfig(score="sigmoid", renormalize="none"), True),
    "switch": (SwitchGateConfig(jitter=0.0), True),
    "gshard": (GShardGateConfig(), True),
    "noisy": (NoisyGateConfig(), True),
    "aux_free": (AuxFreeGateConfig(), True),
    "group_limited": (GroupLimitedGateConfig(num_groups=3, top_groups=2), False),
    "sinkhorn": (SinkhornGateConfig(), False),
}


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("name", GATES)
def test_gates_decide_the_same_on_the_kernels(name, masked, monkeypatch):
    config, fused = GATES[name]
    torch.manual_seed(0)
    layer = MoELayer(d_model=8, num_experts=6, d_hidden=8, gate=config)
    if name == "aux_free":
        layer.gate.selection_bias_E.copy_(BIAS)
    x = torch.randn(3, 10, 8)
    mask = (torch.arange(30).view(3, 10) % 4 == 0).int() if masked else None

    def compute():
        torch.manual_seed(1)
        layer.zero_grad()
        if layer.gate.counts_E is not None:
            layer.gate.counts_E.zero_()
        layer(x, mask=mask).square().sum().backward()
        counted = [] if layer.gate.counts_E is None else [layer.gate.counts_E.clone()]
        grads = [p.grad for p in layer.gate.parameters() if p.grad is not None]
        return [layer.last_stats.tokens_per_expert_E, *counted, *grads]

    plain = compute()
    run = ops_on_kernels(monkeypatch)
    for got, want in zip(compute(), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    # The kernel's variant 1 is a softmax, 2 a sigmoid, 0 top-k alone.
    scored = [name for name in run.cupy.launches if "gate_forward" in name and not name.endswith(", 0>")]
    assert bool(scored) == fused
    # Choices are counted where they are made, and nowhere else but in the balance loss and for masked tokens.
    if fused and not masked and name in ("aux_free", "sigmoid") and not config.load_balance_coef:
        assert "moeflow::histogram" not in run.cupy.launches


def test_a_gate_of_ones_own_keeps_its_choice(monkeypatch):
    from moeflow.moe.gates import Gate

    class Last(Gate):
        def choose(self, logits_TE, scores_TE, context):
            ids = torch.full((len(scores_TE), self.top_k), self.num_experts - 1)
            return ids, scores_TE.gather(1, ids)

    ops_on_kernels(monkeypatch)
    gate = Last(8, 6, NaiveGateConfig(top_k=1))
    assert (gate(torch.randn(4, 8)).ids_TK == 5).all()


def test_whole_gate_compiles():
    torch.manual_seed(0)
    layer = MoELayer(d_model=8, num_experts=6, d_hidden=8)
    gate, x = layer.gate.eval(), torch.randn(7, 8)
    compiled = torch.compile(gate.forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x).ids_TK, gate(x).ids_TK)


def test_the_operator_compiles_on_the_kernels(monkeypatch):
    run = ops_on_kernels(monkeypatch)
    x = torch.randn(7, 6, requires_grad=True)

    def compute(x):
        made = ops.gate(x, 2)
        return made.weights_TK.sum() + made.scores_TE.square().sum()

    torch.compile(compute, backend="aot_eager", fullgraph=True)(x).backward()
    assert x.grad.isfinite().all() and len(run.cupy.launches) == 2
