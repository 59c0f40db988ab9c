"""Experts of every kind against calling each by itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from moeflow.errors import ConfigError
from moeflow.models.init import initialize
from moeflow.moe import Experts, GroupedLinear, ListExperts, ModuleExperts, MoELayer
from moeflow.schema.gate import NaiveGateConfig
from tests.moe.reference import gradients

COUNTS = {"uneven": [3, 0, 4, 1], "none": [0, 0, 0, 0], "all to one": [0, 0, 6, 0]}


class Wide(nn.Module):
    """Two layers and a parameter of its own."""

    def __init__(self, d_model: int, width: int = 7):
        super().__init__()
        self.first = nn.Linear(d_model, width)
        self.second = nn.Linear(width, d_model, bias=False)
        self.scale = nn.Parameter(torch.rand(d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.second(torch.tanh(self.first(x)))


def narrow(d_model: int) -> nn.Module:
    return nn.Linear(d_model, d_model)


def squared(d_model: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d_model, 3), nn.SiLU(), nn.Linear(3, d_model))


def separate(modules: list[nn.Module], rows: Tensor, counts: list[int], upstream: Tensor):
    """Output and gradients (rows, then each module's parameters) of modules called one by one."""
    rows = rows.clone().requires_grad_()
    out = torch.cat([module(part) for module, part in zip(modules, rows.split(counts))])
    parameters = [p for module in modules for p in module.parameters()]
    grads = gradients(out, upstream, [rows, *parameters])
    return out, grads[0], [dict(zip((n for n, _ in m.named_parameters()), _take(grads, m, modules))) for m in modules]


def _take(grads: list[Tensor], module: nn.Module, modules: list[nn.Module]) -> list[Tensor]:
    start = 1 + sum(len(list(m.parameters())) for m in modules[: modules.index(module)])
    return grads[start : start + len(list(module.parameters()))]


@pytest.mark.parametrize("counts", COUNTS)
def test_user_class_stacked(counts: str):
    torch.manual_seed(0)
    counts_E = COUNTS[counts]
    experts = ModuleExperts(Wide, 4, 5, 5).double()
    modules = [Wide(5).double() for _ in range(4)]
    for e, module in enumerate(modules):
        for name, p in module.named_parameters():
            with torch.no_grad():
                p.copy_(getattr(experts, name.replace(".", "__"))[e])
    rows = torch.randn(sum(counts_E), 5, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(sum(counts_E), 5, dtype=torch.float64)
    out = experts(rows, torch.tensor(counts_E))
    out.backward(upstream)
    expected, grad_rows, grads = separate(modules, rows.detach(), counts_E, upstream)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(rows.grad, grad_rows)
    for e in range(4):
        for name, grad in grads[e].items():
            torch.testing.assert_close(getattr(experts, name.replace(".", "__")).grad[e], grad)


@pytest.mark.parametrize("counts", COUNTS)
def test_different_classes_in_one_layer(counts: str):
    torch.manual_seed(0)
    counts_E = COUNTS[counts]
    experts = ListExperts([Wide, narrow, squared, Wide], 5, 5).double()
    rows = torch.randn(sum(counts_E), 5, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(sum(counts_E), 5, dtype=torch.float64)
    out = experts(rows, torch.tensor(counts_E))
    modules = copy.deepcopy(list(experts.experts.values()))
    out.backward(upstream)
    expected, grad_rows, grads = separate(modules, rows.detach(), counts_E, upstream)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(rows.grad, grad_rows)
    for e, module in enumerate(experts.experts.values()):
        for name, p in module.named_parameters():
            assert p.grad is not None, "an idle expert has a zero gradient"
            torch.testing.assert_close(p.grad, grads[e][name])


def test_an_idle_expert_is_not_called():
    class Fussy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert len(x) > 0, "no rows"
            return super().forward(x)

    for experts in (ListExperts([lambda d: Fussy(d, d)] * 3, 4, 4), ModuleExperts(lambda d: Fussy(d, d), 3, 4, 4)):
        experts(torch.randn(5, 4), torch.tensor([2, 0, 3])).sum().backward()
        assert all(p.grad is not None for p in experts.parameters())


def test_layer_takes_a_class_a_list_or_experts():
    gate = NaiveGateConfig(load_balance_coef=0.0)
    assert isinstance(MoELayer(4, 3, gate=gate, experts=Wide).experts, ModuleExperts)
    assert isinstance(MoELayer(4, 2, gate=gate, experts=[Wide, narrow]).experts, ListExperts)
    with_buffers = MoELayer(4, 3, gate=gate, experts=lambda d: nn.Sequential(nn.Linear(d, d), nn.BatchNorm1d(d)))
    assert isinstance(with_buffers.experts, ListExperts), "buffers cannot be stacked"
    assert with_buffers(torch.randn(30, 4)).shape == (30, 4)
    with pytest.raises(ConfigError, match="num_experts=3"):
        MoELayer(4, 3, gate=gate, experts=[Wide, narrow])


@pytest.mark.parametrize("experts", [Wide, [Wide, narrow, squared]])
def test_layer_with_user_experts_is_a_loop_over_tokens(experts):
    torch.manual_seed(1)
    layer = MoELayer(5, 3, gate=NaiveGateConfig(load_balance_coef=0.0), experts=experts)
    x = torch.randn(17, 5)
    weights, ids = torch.softmax(x @ layer.gate.proj.weight.t(), 1).topk(2, 1)
    functions = layer.experts.callables()
    expected = torch.stack(
        [
            sum(w * functions[e](x[t : t + 1])[0] for w, e in zip(weights[t] / weights[t].sum(), ids[t].tolist()))
            for t in range(17)
        ]
    )
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_training_mode_reaches_stacked_modules():
    layer = MoELayer(6, 2, experts=lambda d: nn.Sequential(nn.Linear(d, d), nn.Dropout(0.9)))
    x = torch.randn(40, 6)
    assert (layer.train()(x) == 0).any()
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("factories", [Wide, [squared, squared, narrow, squared]])
def test_any_split_draws_the_same_experts(ep: int, factories):
    def build() -> nn.Module:
        with torch.device("meta"):
            return MoELayer(5, 4, experts=factories)

    whole = build()
    _materialize(whole, 3)
    for rank in range(ep):
        part = build()
        part.experts.shard(rank, ep)
        _materialize(part, 3)
        mine = slice(rank * 4 // ep, (rank + 1) * 4 // ep)
        for name, p in part.experts.named_parameters():
            full = whole.experts.get_parameter(name)
            assert torch.equal(p, full[mine] if part.experts.stacked else full), name
    if whole.experts.stacked:
        assert not torch.equal(whole.experts.first__weight[0], whole.experts.first__weight[1])


def _materialize(model: nn.Module, seed: int) -> None:
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(float("nan"))
    initialize(model, seed)
    assert not any(p.isnan().any() for p in model.parameters())


def test_cutting_over_etp_is_refused():
    for experts in (ModuleExperts(Wide, 2, 4, 4), ListExperts([Wide, narrow], 4, 4), GroupedLinear(2, 4, 4)):
        with pytest.raises(ConfigError, match=r"parallel.etp=2"):
            experts.shard(0, 1, 0, 2)


# --- GroupedLinear ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_linear(counts: str, bias: bool):
    torch.manual_seed(0)
    counts_E = COUNTS[counts]
    layer = GroupedLinear(4, 3, 5, bias).double()
    if bias:
        nn.init.normal_(layer.bias)
    modules = [nn.Linear(3, 5, bias).double() for _ in range(4)]
    with torch.no_grad():
        for e, module in enumerate(modules):
            module.weight.copy_(layer.weight[e])
            if bias:
                module.bias.copy_(layer.bias[e])
    rows = torch.randn(sum(counts_E), 3, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(sum(counts_E), 5, dtype=torch.float64)
    out = layer(rows, torch.tensor(counts_E))
    out.backward(upstream)
    expected, grad_rows, grads = separate(modules, rows.detach(), counts_E, upstream)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(rows.grad, grad_rows)
    for e in range(4):
        for name, grad in grads[e].items():
            torch.testing.assert_close(layer.get_parameter(name).grad[e], grad)
    assert torch.autograd.gradcheck(
        lambda r, w: torch.func.functional_call(layer, {"weight": w}, (r, torch.tensor(counts_E))),
        (rows.detach().requires_grad_(), layer.weight.detach().requires_grad_()),
    )


def test_grouped_linear_opcheck():
    args = (torch.randn(5, 3, requires_grad=True), torch.tensor([2, 0, 3]), torch.randn(3, 4, 3, requires_grad=True))
    for bias in (None, torch.randn(3, 4, requires_grad=True)):
        torch.library.opcheck(torch.ops.moeflow.grouped_linear.default, (*args, bias))


def test_grouped_linear_under_autocast():
    layer = GroupedLinear(3, 8, 8)
    rows, counts = torch.randn(6, 8), torch.tensor([2, 0, 4])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(rows, counts)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), layer(rows, counts), rtol=0.02, atol=0.02)


def test_grouped_linear_is_drawn_like_a_linear_layer():
    layer = GroupedLinear(3, 64, 512)
    initialize(layer, 0)
    expected = nn.Linear(64, 512).weight.std().item()
    assert all(layer.weight[e].std().item() == pytest.approx(expected, rel=0.05) for e in range(3))


class TwoLayers(Experts):
    """An expert built of grouped layers, as a user would."""

    def __init__(self, num_experts: int, d_model: int):
        super().__init__(num_experts, d_model)
        self.layers = nn.ModuleList([GroupedLinear(num_experts, d_model, 9), GroupedLinear(num_experts, 9, d_model)])

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](rows, counts).relu(), counts)


def test_experts_built_of_grouped_layers():
    layer = MoELayer(5, 4, experts=TwoLayers(4, 5), gate=NaiveGateConfig(top_k=1, load_balance_coef=0.0))
    x = torch.randn(12, 5)
    first, second = layer.experts.layers
    probs = torch.softmax(x @ layer.gate.proj.weight.t(), 1)
    expected = [second.weight[e] @ (first.weight[e] @ x[t]).relu() for t, e in enumerate(probs.argmax(1).tolist())]
    torch.testing.assert_close(layer(x), torch.stack(expected), rtol=1e-5, atol=1e-6)
    layer.experts.shard(1, 2)
    assert first.weight.shape[0] == 2
    assert (layer.experts.first_expert, first.first_expert, second.first_expert) == (2, 2, 2)


def test_parameters_of_ones_own_need_the_methods():
    class Own(TwoLayers):
        def __init__(self):
            super().__init__(2, 4)
            self.scale = nn.Parameter(torch.ones(2))

    with pytest.raises(NotImplementedError, match="must define shard"):
        Own().shard(0, 2)
    with pytest.raises(NotImplementedError, match="must define init_parameters"):
        initialize(Own(), 0)
