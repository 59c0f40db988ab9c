"""Shadowed experts, and experts that move: a run with them follows one without, on every kind of layout."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import torch

from moeflow.errors import ConfigError
from moeflow.moe import MLPExperts, MoELayer
from moeflow.moe.gates.base import in_backward
from moeflow.parallel.balance import Balance, check_experts
from moeflow.parallel.balancer import Balancer
from moeflow.parallel.parallelize import parallelize
from moeflow.parallel.placement import move_experts, order_of
from moeflow.parallel.shadow import Message, collect, spread
from moeflow.parallel.topology import Topology
from moeflow.plan.profile import default_profile
from moeflow.schema import BalanceConfig, ParallelConfig, PrecisionConfig
from moeflow.schema.balance import OverlapConfig
from tests.distributed import run_ranks
from tests.parallel import parity
from tests.parallel.gpt_run import train
from tests.parallel.parity import Case
from tests.parallel.small_net import MIXED, Gated, Net

ALL = list(range(parity.NUM_EXPERTS))


def shadows(*experts: int) -> dict:
    return {"balance": BalanceConfig(shadow=True, fixed_shadows=list(experts))}


CASES = [
    Case(2, {"ep": 2}, shadows(1)),
    Case(2, {"ep": 2}, shadows(*ALL)),
    Case(2, {"ep": 2}, {"grad_accum": 2, **shadows(0, 5)}),
    Case(4, {"ep": 4}, shadows(2, 3, 7)),
    Case(4, {"ep": 2}, shadows(1, 6)),  # edp 2
    Case(4, {"tp": 2, "ep": 2}, shadows(1, 6)),
    Case(4, {"pp": 2, "ep": 2}, shadows(1, 6)),
    Case(4, {"ep": 2, "etp": 2}, shadows(1, 6)),
    Case(2, {"ep": 2}, shadows()),
    Case(4, {"ep": 2, "etp": 2}, shadows(*ALL)),
]
# The others take part in the slow tests.
QUICK = 5


def _name(case: Case) -> str:
    layout = " ".join(f"{key}={size}" for key, size in case.parallel.items())
    return f"{layout} {case.more['balance'].fixed_shadows}{' accumulated' if 'grad_accum' in case.more else ''}"


@pytest.fixture(scope="module")
def alone():
    return parity.reference()


@pytest.fixture
def profile(tmp_path):
    """Coefficients with which a small layer's hot experts are worth a message."""
    link = {"latency_s": 0.0, "bytes_per_s": 1e6}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"inside": link, "between": link, "flops": {"fp32": 1e8, "bf16": 1e8}, "launch_s": 0}))
    return str(path)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if n >= QUICK else [], id=_name(case))
        for n, case in enumerate(CASES)
    ],
)
def test_fixed_shadows_follow_one_process(case, alone):
    found = parity.compare(case, alone)
    assert found.holds, found


def _chosen(profile, recomputed, dtype):
    """A run whose shadows the cost model chooses: losses, parameters, and the choices of both kinds of forward pass."""
    forward, again = [], []
    decide = Balancer.decide

    def recorded(self, counts):
        found = decide(self, counts)
        (again if in_backward() else forward).append(found)
        return found

    Balancer.decide = recorded
    model = {**parity.MODEL, "d_hidden": 96, "activation_checkpointing": recomputed}
    balance = BalanceConfig(shadow=profile is not None, profile=profile, margin=0.0)
    losses, _, whole = train({"ep": 2}, steps=10, model=model, precision=PrecisionConfig(dtype), balance=balance)
    return losses, whole, forward, again


@pytest.mark.distributed
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), pytest.param("bf16", 2e-2, marks=pytest.mark.slow)])
def test_chosen_shadows_and_recomputation(profile, dtype, tolerance):
    (alone, parameters, _, _), *_ = run_ranks(_chosen, 2, None, False, dtype, timeout=60, init=False)
    both = run_ranks(_chosen, 2, profile, True, dtype, timeout=60, init=False)
    for losses, whole, forward, again in both:
        assert losses == pytest.approx(alone, rel=tolerance)
        if dtype == "fp32":
            worst = max(
                (whole[name] - value).norm() / value.norm().clamp(min=1e-12) for name, value in parameters.items()
            )
            assert worst < tolerance
        # What is computed anew chooses as before: two layers, the last one first.
        assert len(forward) == len(again) == 20
        assert again == [choice for step in range(10) for choice in reversed(forward[2 * step : 2 * step + 2])]
    assert both[0][2] == both[1][2]
    assert any(both[0][2]) and len(set(both[0][2])) > 2, "the model's choices follow the counts"


# --- placement ---


def test_orders_keep_what_stays():
    order = np.array([0, 1, 2, 3, 4, 5])
    found = order_of(np.array([0, 1, 0, 1, 2, 2]), order, 3)
    assert found.tolist() == [0, 2, 1, 3, 4, 5]
    again = order_of(np.array([2, 1, 0, 1, 2, 0]), found, 3)
    assert again.tolist() == [5, 2, 1, 3, 4, 0]


def _moved():
    """Each tensor of an expert stands where its number says, after moves there and back."""
    topology = Topology.create(ParallelConfig(ep=2), 30.0)
    ep, local = topology["ep"], 3
    experts = MLPExperts(6, 4, 8)
    experts.shard(ep.rank, 2)
    optimizer = torch.optim.AdamW(experts.parameters())
    home = np.arange(6)

    def stamp(tensor, order, plus):
        for place in range(local):
            tensor[place] = float(order[ep.rank * local + place] + plus)

    def right(order):
        pairs = [(p, 0) for p in experts.parameters()]
        pairs += [(optimizer.state[p][key], plus) for p in experts.parameters() for key, plus in _KEYS]
        return all(
            bool((tensor[place] == order[ep.rank * local + place] + plus).all())
            for tensor, plus in pairs
            for place in range(local)
        )

    with torch.no_grad():
        for parameter in experts.parameters():
            stamp(parameter, home, 0)
            optimizer.state[parameter] = {key: torch.empty_like(parameter) for key, _ in _KEYS} | {
                "step": torch.ones(())
            }
            for key, plus in _KEYS:
                stamp(optimizer.state[parameter][key], home, plus)
    results, before = [right(home)], home
    for order in ([3, 1, 2, 0, 4, 5], [5, 4, 3, 2, 1, 0], [1, 0, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]):
        move_experts(experts, optimizer, before, np.array(order), ep)
        results.append(right(order))
        before = np.array(order)
    return results


_KEYS = (("exp_avg", 100), ("exp_avg_sq", 200))


@pytest.mark.distributed
def test_moves_take_the_optimizers_state_along():
    assert run_ranks(_moved, 2, timeout=40) == [[True] * 5] * 2


def _forced_moves(parallel, shadow, overlap):
    """A run in which experts move every third step, whatever it gains."""
    turn = iter(range(1000))

    def decided(self):
        # The same on all ranks: a rotation, and then a reversal of the present order.
        number = next(turn)
        now = {name: balancer.order_E for name, balancer in self.balancers.items()}
        return {name: (np.roll(order, 3) if number % 2 else order[::-1]).tolist() for name, order in now.items()}

    Balance._decided = decided
    balance = BalanceConfig(shadow=shadow, placement=True, interval=3, fixed_shadows=[1, 6] if shadow else None)
    return train(parallel, model=parity.MODEL, balance=balance, overlap=OverlapConfig(chunks=overlap))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "parallel", "shadow", "overlap"),
    [
        pytest.param(2, {"ep": 2}, False, "1", marks=pytest.mark.slow),
        (2, {"ep": 2, "shared_memory": False}, True, "2"),
        (4, {"ep": 2, "etp": 2}, True, "1"),
        pytest.param(4, {"ep": 4}, True, "1", marks=pytest.mark.slow),
        pytest.param(4, {"ep": 2}, True, "1", marks=pytest.mark.slow),
        pytest.param(4, {"pp": 2, "ep": 2, "shared_memory": False}, True, "2", marks=pytest.mark.slow),
        pytest.param(4, {"tp": 2, "ep": 2}, False, "1", marks=pytest.mark.slow),
        pytest.param(4, {"ep": 2, "etp": 2, "shared_memory": False}, True, "2", marks=pytest.mark.slow),
    ],
)
def test_experts_that_move_follow_one_process(world, parallel, shadow, overlap, alone):
    for losses, norms, whole in run_ranks(_forced_moves, world, parallel, shadow, overlap, timeout=120, init=False):
        assert losses == pytest.approx(alone[0], rel=1e-5)
        assert norms == pytest.approx(alone[1], rel=1e-4)
        for name, value in whole.items():
            assert (value - alone[2][name]).norm() <= 1e-5 * alone[2][name].norm(), name


# --- messages ---


MESSAGES = [((5,), 2, 7), ((0, 1, 6), 2, 5), ((0, 1, 2, 3), 1, 6), ((3,), 1, 1)]


def _messages():
    """Of each message, whether it arrives, and whether its owners get back everyone's sum."""
    group = Topology.create(ParallelConfig(ep=4), 30.0)["ep"]
    generator = torch.Generator().manual_seed(0)
    found = []
    for (slots, local, numbers), dtype in product(MESSAGES, (torch.float32, torch.bfloat16)):
        message = Message(group, slots, local, numbers)
        values, *added = torch.randn(5, len(slots), numbers, generator=generator).to(dtype)
        mine = [index for index, slot in enumerate(slots) if slot // local == group.rank]
        whole = spread(values[mine].flatten(), message)
        total = added[0].float()
        for other in added[1:]:
            total = total + other.float()
        got = collect(added[group.rank].flatten(), message)
        found.append((whole.equal(values.flatten()), got.equal(total[mine].to(dtype).flatten())))
    return found


@pytest.mark.distributed
def test_messages_arrive_and_sums_are_in_the_order_of_ranks():
    assert run_ranks(_messages, 4, timeout=40) == [[(True, True)] * 2 * len(MESSAGES)] * 4


def test_experts_that_cannot_travel_are_refused():
    layer = MoELayer(16, 4, experts=MIXED)
    with pytest.raises(ConfigError, match="modules of their own") as caught:
        check_experts("blocks.0.moe", layer.experts)
    assert "balance=none" in str(caught.value)
    with torch.device("meta"):
        check_experts("blocks.0.moe", MoELayer(16, 4, experts=Gated).experts)


def _own_class():
    """Experts of a user's class: outputs, and gradients of all parameters, without shadows and with some and all."""
    topology = Topology.create(ParallelConfig(ep=2), 30.0)
    found = []
    for fixed in (None, [3], [0, 1, 2, 3]):
        with torch.device("meta"):
            net = Net("naive", experts="modules")
        parallelize(net, topology, 0, torch.device("cpu"))
        config = BalanceConfig(shadow=fixed is not None, fixed_shadows=fixed)
        Balance.of(net, topology, config, default_profile("cpu"), "fp32")
        out = net(torch.randn(24, 8, generator=torch.Generator().manual_seed(topology.rank)))
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad for p in net.parameters())])
    return found


@pytest.mark.distributed
def test_experts_of_a_users_class():
    for plain, *shadowed in run_ranks(_own_class, 2, timeout=40):
        for tensors in shadowed:
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(tensors, plain, strict=True))
