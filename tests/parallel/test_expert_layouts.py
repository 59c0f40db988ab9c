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
        assert other.keys() == whole.keys()
        for name, value in whole.items():
            # Relative to the whole tensor: AdamW turns rounding of a gradient near zero into a step of full size.
            assert (other[name] - value).norm() <= 1e-5 * value.norm(), name
    # What is replicated stays the same to the last bit.
    for name, value in results[0][2].items():
        for _, _, other in results[1:]:
            assert torch.equal(other[name], value), name


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "parallel"), LAYOUTS, ids=[f"{w}-{p}" for w, p in LAYOUTS])
def test_twenty_clipped_steps_agree_with_one_process(world, parallel):
    check(world, parallel)


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
