"""Attention with biases, norms and latents, and shared experts: the same training on tensor-parallel layouts."""

import pytest
import torch

from moeflow.errors import ConfigError
from tests.distributed import RanksFailed, run_ranks
from tests.parallel.gpt_run import train

OPTIONS = {
    "biases, head norms, wide heads": {
        "num_kv_heads": 2, "qkv_bias": True, "qk_norm": "head", "head_dim": 12, "shared_hidden": 8, "shared_gate": True,
    },
    "latents": {
        "attention": "mla", "mla_q_rank": 12, "mla_kv_rank": 10, "mla_nope_dim": 8, "mla_rope_dim": 4,
        "mla_value_dim": 6, "shared_hidden": 8, "first_dense": 1, "moe_every": 1,
    },
}  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", [{"tp": 2, "ep": 2}, {"tp": 2, "sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("name", list(OPTIONS))
def test_eight_steps_agree_with_one_process(name, parallel):
    losses, norms, whole = run_one(name, {})
    for other_losses, other_norms, other in run_ranks(run_one, 2, name, parallel, timeout=90, init=False):
        torch.testing.assert_close(torch.tensor(other_losses), torch.tensor(losses), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(other_norms), torch.tensor(norms), rtol=1e-4, atol=0)
        for key, value in whole.items():
            assert (other[key] - value).norm() <= 1e-4 * value.norm() + 1e-7, key


def run_one(name, parallel):
    return train(parallel, steps=8, model=OPTIONS[name])


@pytest.mark.distributed
def test_a_norm_over_all_heads_is_refused_with_tensor_parallelism():
    with pytest.raises(RanksFailed, match=r"model\.qk_norm=all"):
        run_ranks(refused, 2, timeout=60, init=False)


def refused():
    return train({"tp": 2}, steps=1, model={"qk_norm": "all"})


def test_options_that_do_not_fit():
    for model, key in (
        ({"attention": "mla", "head_dim": 8}, "head_dim"),
        ({"attention": "mla", "qkv_bias": True}, "qkv_bias"),
        ({"attention": "mla", "mla_rope_dim": 3}, "mla_rope_dim"),
        ({"head_dim": 7}, "head_dim"),
    ):
        with pytest.raises(ConfigError, match=key) as caught:
            train({}, steps=1, model=model)
        assert caught.value.mend
