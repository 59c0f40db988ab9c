"""The same training on one process and on layouts of several: losses, norms and parameters agree."""

import pytest
import torch

from tests.distributed import run_ranks
from tests.parallel.small_net import train

LAYOUTS = [
    (2, {"ep": 2}),
    (2, {}),  # experts on both ranks alike: edp = 2
    (2, {"etp": 2}),
    (4, {"ep": 4}),
    (4, {"ep": 2}),  # edp = 2
    (4, {"ep": 2, "etp": 2}),
]


def check(world, parallel, gate="naive", options=None):
    losses, norms, whole = train({}, gate, options)
    results = run_ranks(train, world, parallel, gate, options, timeout=90)
    for other_losses, other_norms, other in results:
        torch.testing.assert_close(torch.tensor(other_losses), torch.tensor(losses), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(other_norms), torch.tensor(norms), rtol=1e-4, atol=0)
        for name in other:
            value = whole[name]
            # Relative to the whole tensor: AdamW turns rounding of a gradient near zero into a step of full size.
            assert (other[name] - value).norm() <= 1e-5 * value.norm(), name
    first = {}
    # What is replicated stays the same to the last bit; experts of different classes are not on every rank.
    for _, _, other in results:
        for name, value in other.items():
            assert torch.equal(first.setdefault(name, value), value), name
    assert first.keys() == whole.keys()


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "parallel"), LAYOUTS, ids=[f"{w}-{p}" for w, p in LAYOUTS])
def test_twenty_clipped_steps_agree_with_one_process(world, parallel):
    check(world, parallel)


@pytest.mark.distributed
@pytest.mark.parametrize("experts", ["mixed", "modules"])
@pytest.mark.parametrize(
    ("world", "parallel"), [(2, {"ep": 2}), (4, {"ep": 4}), (4, {"ep": 2}), (4, {"ep": 2, "tp": 2})]
)
def test_experts_of_the_users_own_classes(experts, world, parallel):
    check(world, parallel, options={"experts": experts})


@pytest.mark.distributed
def test_an_idle_expert_of_a_list_takes_part_in_reductions():
    # Top-1: on some ranks and steps an expert has no tokens, or none on one of its two replicas.
    check(4, {"ep": 2}, options={"experts": "mixed", "top_k": 1})


@pytest.mark.distributed
def test_first_choice_balance_and_z_loss_agree():
    # GShard counts first choices; without its chance and its capacity it is deterministic.
    options = {"random_second": False, "capacity_factor": None, "eval_capacity_factor": None, "z_loss_coef": 0.01}
    check(2, {"ep": 2}, "gshard", options)


@pytest.mark.distributed
def test_initial_experts_differ_from_one_another_and_not_between_layouts():
    _, _, whole = train({}, clip=1e-12)
    w_in = whole["model/moe.experts.w_in"]
    assert all(not torch.equal(w_in[0], w_in[e]) for e in range(1, 4))
