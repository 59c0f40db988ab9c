"""FastMoE's API: against a loop over tokens, over workers, its groups of gradients, and its checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moeflow.compat.fmoe import DistributedGroupedDataParallel, FMoE, FMoELinear, FMoETransformerMLP
from moeflow.compat.fmoe import gates as fmoe_gates
from moeflow.compat.fmoe.megatron import fmoefy
from moeflow.errors import ConfigError
from tests.distributed import run_ranks

GATES = [
    fmoe_gates.NaiveGate,
    fmoe_gates.NoisyGate,
    fmoe_gates.GShardGate,
    fmoe_gates.SwitchGate,
    fmoe_gates.SwipeGate,
    fmoe_gates.ZeroGate,
    fmoe_gates.gen_faster_gate(0),
]


class OneExpert(nn.Module):
    """An expert of a list, as FastMoE calls it: with rows and their number."""

    def __init__(self, d_model: int):
        super().__init__()
        self.fc = nn.Linear(d_model, 5)

    def forward(self, x, count):
        assert int(count) == len(x)
        return torch.tanh(self.fc(x))


def by_loop(layer: FMoE, x, expert):
    """Each token through its experts, one after another."""
    ids, scores = layer.gate(x)[:2]
    rows = []
    for t in range(len(x)):
        parts = [s * expert(int(e), x[t : t + 1]) for e, s in zip(ids[t], scores[t], strict=True) if e >= 0]
        rows.append(sum(parts))
    return torch.cat(rows)


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("num_expert", [3, 8])
@pytest.mark.parametrize("kind", ["list", "fused"])
def test_layer_equals_a_loop_over_tokens(kind, num_expert, top_k):
    if kind == "list":
        layer = FMoE(num_expert, 6, top_k=top_k, expert=OneExpert).double()
        expert = lambda e, row: layer.experts[e](row, torch.tensor([1]))  # noqa: E731
    else:
        layer = FMoETransformerMLP(num_expert, 6, 10, top_k=top_k).double()
        one = lambda e: torch.eye(num_expert, dtype=torch.int64)[e]  # noqa: E731
        expert = lambda e, row: layer.experts(row, one(e))  # noqa: E731
    x = torch.randn(17, 6, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(17, 5 if kind == "list" else 6, dtype=torch.float64)
    results = []
    for out in (layer(x), by_loop(layer, x, expert)):
        wanted = [x, *layer.parameters()]
        grads = torch.autograd.grad(out, wanted, upstream, allow_unused=True)
        results.append([out, *(torch.zeros_like(p) if g is None else g for g, p in zip(grads, wanted, strict=True))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_experts_of_different_classes_and_several_inputs():
    class Sum(nn.Module):
        def __init__(self, d_model: int):
            super().__init__()
            self.fc = nn.Linear(d_model, d_model)

        def forward(self, x, count):
            return {"out": self.fc(x["a"]) + x["b"]}

    layer = FMoE(d_model=4, expert=[Sum, Sum, Sum], num_expert=99)
    assert layer.num_expert == 3
    out = layer({"a": torch.randn(7, 4), "b": torch.randn(7, 4)})
    assert out["out"].shape == (7, 4)
    out["out"].sum().backward()
    assert all(p.grad is not None for p in layer.experts.parameters())


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: getattr(gate, "__name__", "faster"))
@pytest.mark.parametrize("training", [True, False])
def test_gates_keep_the_contract(gate, training):
    top_k = {fmoe_gates.SwitchGate: 1}.get(gate, 2)
    made = gate(6, 4, 2, top_k).train(training)
    x = torch.randn(33, 6, requires_grad=True)
    ids, scores = made(x)
    assert ids.shape == scores.shape == (33, top_k) and ids.dtype == torch.int64
    assert ids.min() >= -1 and ids.max() < 8 == made.tot_expert
    assert made.has_loss
    loss = made.get_loss()
    assert not made.has_loss and loss is not None
    if training and gate not in (fmoe_gates.NaiveGate, fmoe_gates.ZeroGate, fmoe_gates.SwipeGate):
        assert loss.item() > 0
        loss.sum().backward()
        assert x.grad is not None or made.gate.weight.grad is not None


def test_scores_of_the_naive_gate_are_a_softmax_over_the_chosen():
    gate = fmoe_gates.NaiveGate(6, 8, 1, top_k=3)
    x = torch.randn(9, 6)
    ids, scores, every = gate(x, return_all_scores=True)
    top, want = every.topk(3)
    torch.testing.assert_close(scores, torch.softmax(top, 1))
    assert torch.equal(ids, want)


def test_losses_do_not_depend_on_how_experts_are_spread():
    x = torch.randn(64, 6)
    for gate in (fmoe_gates.GShardGate, fmoe_gates.SwitchGate):
        found = []
        for num_expert, world_size in ((8, 1), (1, 8)):
            torch.manual_seed(3)
            made = gate(6, num_expert, world_size)
            torch.manual_seed(4)
            made(x)
            found.append(made.get_loss().item())
        assert found[0] == pytest.approx(found[1])


def test_mask_hook_and_gates_of_the_users_own():
    class Mine(fmoe_gates.BaseGate):
        def __init__(self, d_model, num_expert, world_size, top_k):
            super().__init__(num_expert, world_size)

        def forward(self, x):
            return torch.arange(2 * len(x)) % self.tot_expert, torch.full((len(x), 1, 2), 0.5)  # flat, as FastMoE's

    mask = torch.tensor([0, 1, 0, 2, 0])
    seen = []
    layer = FMoETransformerMLP(
        2, 4, 8, gate=Mine, mask=mask, mask_dict={1: torch.ones(4), 2: torch.full((4,), 3.0)},
        gate_hook=lambda ids, scores, _: seen.append(ids),
    )  # fmt: skip
    x = torch.randn(5, 4)
    out = layer(x)
    assert torch.equal(out[1], torch.ones(4)) and torch.equal(out[3], torch.full((4,), 3.0))
    rows = torch.cat([x[[0, 2, 4]]] * 2)
    both = layer.experts(rows, torch.tensor([3, 3])) / 2
    torch.testing.assert_close(out[[0, 2, 4]], both[:3] + both[3:])
    assert seen[0].shape == (5, 2)


def test_initial_values_are_those_of_one_linear_layer():
    weight = FMoELinear(4, 100, 4096).weight
    assert weight.std().item() == pytest.approx(nn.Linear(100, 4096).weight.std().item(), rel=0.02)


@pytest.mark.parametrize("fused", [True, False])
def test_checkpoints_of_fastmoe_load(fused):
    layer, other = FMoETransformerMLP(3, 4, 8), FMoETransformerMLP(3, 4, 8)
    state = dict(other.state_dict())
    assert set(state) == {
        *(f"experts.{name}.{kind}" for name in ("htoh4", "h4toh") for kind in ("weight", "bias")),
        "gate.gate.weight",
        "gate.gate.bias",
    }
    if not fused:
        for name in [name for name in state if name.startswith("experts.")]:
            value = state.pop(name)
            for e in range(3):
                state[f"experts.{e}.{name.removeprefix('experts.')}"] = value[e : e + 1]
    layer.load_state_dict(state)
    x = torch.randn(6, 4)
    assert torch.equal(layer(x), other(x))


def test_checkpoints_of_the_noisy_gate_load():
    gate = fmoe_gates.NoisyGate(4, 6, 1)
    w_gate, w_noise = torch.randn(4, 6), torch.randn(4, 6)
    gate.load_state_dict({"w_gate": w_gate, "w_noise": w_noise})
    assert torch.equal(gate.gate.weight, w_gate.t()) and torch.equal(gate.noise.weight, w_noise.t())


# --- workers ---------------------------------------------------------------------------------------------------------


def _steps(world_size: int, steps: int = 5) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a model with its experts over all workers; losses over the whole batch, and this worker's parameters."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    whole = FMoETransformerMLP(4, 6, 8)  # all experts, drawn alike on every worker
    layer = FMoETransformerMLP(4 // world_size, 6, 8, world_size=world_size, expert_dp_comm="none")
    with torch.no_grad():
        layer.gate.load_state_dict(whole.gate.state_dict())
        for own, all_of in zip(layer.experts.parameters(), whole.experts.parameters(), strict=True):
            own.copy_(all_of.chunk(world_size)[rank if world_size > 1 else 0])
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(6, 2))
    ddp = DistributedGroupedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(16, 6, generator=generator), torch.randn(16, 2, generator=generator)
        loss = nn.functional.mse_loss(ddp(x.chunk(world)[rank]), y.chunk(world)[rank])
        optimizer.zero_grad()
        loss.backward()
        ddp.allreduce_gradients()
        optimizer.step()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses, {name: p.detach().clone() for name, p in ddp.named_parameters()}


@pytest.mark.distributed
def test_two_workers_take_the_steps_of_one():
    losses, alone = _steps(1)
    results = run_ranks(_steps, 2, 2, timeout=60)
    for rank, (other, parameters) in enumerate(results):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(losses), rtol=1e-5, atol=0)
        for name, value in parameters.items():
            want = alone[name].chunk(2)[rank] if ".experts." in name else alone[name]
            assert (value - want).norm() <= 1e-5 * want.norm(), name


def _slices(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = FMoETransformerMLP(4, 6, 8, slice_group=dist.group.WORLD, mask=torch.arange(rows) % 5 == 4)
    x = torch.randn(rows, 6, requires_grad=True)
    out = layer(x)
    layer.slice_group = None
    layer._dispatcher = None
    return out, layer(x)


@pytest.mark.distributed
@pytest.mark.parametrize("rows", [10, 8, 1])
def test_slices_of_tokens_lose_none(rows):
    for out, want in run_ranks(_slices, 4, rows, timeout=60):
        torch.testing.assert_close(out, want)


def _groups() -> list[tuple[float, ...]]:
    """Gradients after reduction over named groups; one worker lacks one of them."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = nn.ParameterList([nn.Parameter(torch.full((2,), float(rank))) for _ in range(4)])
    for parameter, comm in zip(model, ("dp", "pair", "none", "world"), strict=True):
        parameter.dp_comm = comm
    ddp = DistributedGroupedDataParallel(model, pair_group=pairs[rank // 2])
    synced = [p[0].item() for p in model]
    for number, parameter in enumerate(model):
        if not (number == 1 and rank == 1):
            parameter.grad = torch.full((2,), float(10 * (rank + 1)))
    ddp.allreduce_gradients()
    return [tuple(synced), tuple(p.grad[0].item() for p in model)]


@pytest.mark.distributed
def test_gradients_are_averaged_inside_each_named_group():
    results = run_ranks(_groups, 4, timeout=60)
    for rank, (synced, grads) in enumerate(results):
        assert synced == (0.0, float(rank // 2 * 2), float(rank), 0.0)
        pair = 5.0 if rank < 2 else 35.0  # rank 1 has none: zero
        assert grads == (25.0, pair, 10.0 * (rank + 1) / 4, 25.0)


# --- Megatron --------------------------------------------------------------------------------------------------------


class FakeMegatron(nn.Module):
    """What of Megatron-LM's layers matters here."""

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(8, 32), nn.Linear(32, 8)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = FakeMegatron.MLP()

        def forward(self, x):
            out, bias = self.mlp(x)
            return x + out + bias

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer() for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_fmoefy():
    model = fmoefy(FakeMegatron(), fmoe_num_experts=4, gate=fmoe_gates.GShardGate)
    mlp = model.layers[0].mlp
    assert mlp.d_hidden == 16 and isinstance(mlp.gate, fmoe_gates.GShardGate)
    model(torch.randn(3, 5, 8)).sum().backward()
    assert {p.dp_comm for p in mlp.experts.parameters()} == {"none"} and mlp.gate.gate.weight.dp_comm == "gate"
    with pytest.raises(ConfigError, match="fmoe_num_experts"):
        fmoefy(FakeMegatron())
    with pytest.raises(ConfigError, match="no layer with"):
        fmoefy(nn.Linear(2, 2), fmoe_num_experts=2)


def test_what_is_refused():
    with pytest.raises(ConfigError, match="auto_allreduce"):
        DistributedGroupedDataParallel(nn.Linear(2, 2), auto_allreduce=True)
    with pytest.raises(ConfigError, match="dpgroup: no such argument"):
        DistributedGroupedDataParallel(nn.Linear(2, 2), dpgroup=None)
    with pytest.raises(ConfigError, match="world_size=2: the group that the experts are spread over has 1 workers"):
        FMoETransformerMLP(2, 4, 8, world_size=2)(torch.randn(3, 4))
    with pytest.raises(ConfigError, match="mask has 4 entries for 3 tokens"):
        FMoETransformerMLP(2, 4, 8, mask=torch.zeros(4, dtype=torch.int64))(torch.randn(3, 4))
