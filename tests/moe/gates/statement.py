"""Gates written as loops over tokens, the inputs they are tried on, and how the two are compared.

Everything runs in fp64, so that gradients can be checked by finite differences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moeflow.moe.gates import Gate, GateOutput, TokenContext, build_gate
from moeflow.schema.gate import GATES
from tests.moe.reference import gradients, top_k_by_sorting

CASES = ("random", "skewed", "tied", "empty", "one token")
D = 5


def make(name: str, case: str = "random", num_experts: int = 6, num_tokens: int = 13, **options) -> tuple[Gate, Tensor]:
    """A gate in fp64 and tokens [T, D] for it.

    skewed: almost all of the probability on one expert, which hence gets a choice of every token; tied: logits that are
    all equal.
    """
    torch.manual_seed(sum(map(ord, name + case)))
    gate = build_gate(GATES[name](fp32=False, **options), D, num_experts).double()
    num_tokens = {"empty": 0, "one token": 1}.get(case, num_tokens)
    x = torch.randn(num_tokens, D, dtype=torch.float64)
    with torch.no_grad():
        if case == "skewed":
            x = x.abs()
            gate.proj.weight.mul_(0.1)[2] = 1.0
        elif case == "tied":
            gate.proj.weight.zero_()
        else:
            for parameter in gate.parameters():
                if parameter.ndim:
                    parameter.copy_(torch.randn_like(parameter))
    return gate, x


def rows(stack: list[Tensor], width: int) -> Tensor:
    """Stack rows of one width; [0, width] of none."""
    return torch.stack(stack) if stack else torch.zeros(0, width, dtype=torch.float64)


def linear(gate: Gate, x: Tensor) -> list[Tensor]:
    """Logits of each token."""
    bias = gate.proj.bias
    return [gate.proj.weight @ row if bias is None else gate.proj.weight @ row + bias for row in x]


def softmax(row: Tensor) -> Tensor:
    shifted = (row - row.max().detach()).exp()
    return shifted / shifted.sum()


def balance(probs: list[Tensor], ids: list[list[int]], num_experts: int, top_k: int) -> Tensor:
    """E sum_e (c_e / (T K)) mean_t p_te."""
    total = torch.zeros((), dtype=torch.float64)
    for e in range(num_experts):
        count = sum(chosen.count(e) for chosen in ids)
        mean = sum((p[e] for p in probs), torch.zeros((), dtype=torch.float64)) / max(len(probs), 1)
        total = total + num_experts * count / max(len(ids) * top_k, 1) * mean
    return total


def z(logits: list[Tensor]) -> Tensor:
    values = [row.exp().sum().log() ** 2 for row in logits]
    return sum(values, torch.zeros((), dtype=torch.float64)) / max(len(values), 1)


def choose(row: Tensor, k: int) -> list[int]:
    return top_k_by_sorting(row.tolist(), k)


Statement = Callable[[Gate, Tensor], tuple[list[list[int]], Tensor, dict[str, Tensor]]]


def run_seeded(gate: Gate, x: Tensor, context: TokenContext = TokenContext()) -> GateOutput:  # noqa: B008
    torch.manual_seed(0)
    return gate(x, context)


def compare(gate: Gate, x: Tensor, statement: Statement, context: TokenContext = TokenContext()) -> GateOutput:  # noqa: B008
    """Choices, weights, losses, and the gradients of both by x and every parameter; returns the gate's output."""
    x = x.clone().requires_grad_()
    out = run_seeded(gate, x, context)
    torch.manual_seed(0)
    ids, weights, losses = statement(gate, x)
    assert out.ids_TK.tolist() == ids
    assert out.ids_TK.dtype == torch.int64
    kept = (out.ids_TK >= 0).double()
    torch.testing.assert_close(out.weights_TK * kept, weights * kept)
    assert set(out.losses) == set(losses)
    for name, loss in losses.items():
        torch.testing.assert_close(out.losses[name][1].double(), loss, msg=lambda text, name=name: f"{name}: {text}")
    tensors = [x, *(p for p in gate.parameters() if p.requires_grad)]
    upstream = torch.randn_like(weights) * kept

    def total(weights: Tensor, losses: list[Tensor]) -> Tensor:
        return (weights * upstream).sum() + sum((i + 2) * loss.double() for i, loss in enumerate(losses))

    ours = gradients(total(out.weights_TK, [out.losses[n][1] for n in losses]), torch.ones(()).double(), tensors)
    theirs = gradients(total(weights, list(losses.values())), torch.ones(()).double(), tensors)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other)
    return out


def check_numerically(gate: Gate, x: Tensor, context: TokenContext = TokenContext()) -> None:  # noqa: B008
    """Gradients of weights and losses by finite differences."""
    names = [name for name, p in gate.named_parameters() if p.requires_grad]
    values = [gate.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def run(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        out = torch.func.functional_call(gate, dict(zip(names, parameters)), (x, context))
        kept = (out.ids_TK >= 0).double()
        return (out.weights_TK * kept, *(loss.double() for _, loss in out.losses.values()))

    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *values))
