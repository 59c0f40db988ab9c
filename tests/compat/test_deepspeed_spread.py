"""Experts spread over the ranks in a DeepSpeed script: what DeepSpeed is told of them, and what it must not save."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from moeflow import MoELayer
from moeflow.errors import CheckpointError, ConfigError
from tests.distributed import run_ranks

pytest.importorskip("deepspeed", reason='DeepSpeed is not installed: pip install "moeflow[deepspeed]"')


class Net(nn.Module):
    def __init__(self, num_experts):
        super().__init__()
        self.inner, self.moe, self.outer = nn.Linear(4, 8), MoELayer(8, num_experts, d_hidden=12), nn.Linear(8, 1)

    def forward(self, x):
        return self.outer(self.moe(self.inner(x)))


def build(ep, num_experts=4):
    from moeflow.compat.deepspeed_moe import spread

    with torch.device("meta"):
        net = Net(num_experts)
    return spread(net, ep)


def trained(stage, ep):
    """Gradients of SGD's first step at learning rate 1, by name, and the error of a save."""
    import deepspeed

    deepspeed.init_distributed("gloo", dist_init_required=False)
    experts = build(ep)
    part, groups = experts.part, experts.parameter_groups()
    before = {name: p.detach().clone() for name, p in part.model.named_parameters()}
    config = {"train_batch_size": 8, "zero_optimization": {"stage": stage}, "steps_per_print": None}
    config |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}
    engine = deepspeed.initialize(model=part.model, optimizer=torch.optim.SGD(groups, lr=1.0), config=config)[0]
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).chunk(engine.dp_world_size)[engine.global_rank]
    engine.backward(engine(x).square().mean())
    engine.step()
    said = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            engine.save_checkpoint(folder)
    except CheckpointError as error:
        said = error.mend
    return {name: before[name] - p.detach() for name, p in part.model.named_parameters()}, said


def groups_of(ep):
    import deepspeed

    deepspeed.init_distributed("gloo", dist_init_required=False)
    experts = build(ep)
    part, groups = experts.part, experts.parameter_groups(weight_decay=0.1)
    names = {id(p): name for name, p in part.model.named_parameters()}
    return [(g["name"], g["moe"], g["weight_decay"], sorted(names[id(p)] for p in g["params"])) for g in groups]


@pytest.mark.distributed
def test_experts_have_a_group_of_their_own():
    dense, experts = run_ranks(groups_of, 1, 1, timeout=120)[0]
    assert dense[1:3] == (False, 0.1) and experts[1:3] == (True, 0.1)
    assert experts[3] and all(".experts." in name for name in experts[3])
    assert "moe.gate.proj.weight" in dense[3] and not any(".experts." in name for name in dense[3])


@pytest.mark.distributed
@pytest.mark.parametrize(("stage", "ep", "world"), [(2, 2, 4), pytest.param(0, 2, 2, marks=pytest.mark.slow)])
def test_a_step_is_that_of_one_process(stage, ep, world):
    alone, _ = run_ranks(trained, 1, stage, 1, timeout=120)[0]
    for rank, (steps, said) in enumerate(run_ranks(trained, world, stage, ep, timeout=180)):
        # DeepSpeed's own save is refused rather than incomplete.
        assert said is not None and "tensors()" in said
        for name, step in steps.items():
            wanted = alone[name].chunk(ep)[rank % ep] if ".experts." in name else alone[name]
            assert torch.allclose(step, wanted, atol=1e-6), name
            assert wanted.norm() > 0, name


def checkpointed(folder, ep, save):
    """Parameters on this rank after a save of other values than the initial ones, or after a load."""
    import deepspeed

    deepspeed.init_distributed("gloo", dist_init_required=False)
    experts = build(ep)
    if save:
        with torch.no_grad():
            for parameter in experts.part.model.parameters():
                parameter.mul_(2.0).add_(1.0)
        dcp.save(experts.tensors(), checkpoint_id=folder)
    else:
        dcp.load(experts.tensors(), checkpoint_id=folder)
    return {name: p.detach().clone() for name, p in experts.part.model.named_parameters()}


@pytest.mark.distributed
def test_what_two_ranks_saved_one_process_loads(tmp_path):
    saved = run_ranks(checkpointed, 2, str(tmp_path), 2, True, timeout=120)
    (loaded,) = run_ranks(checkpointed, 1, str(tmp_path), 1, False, timeout=120)
    for name, value in loaded.items():
        wanted = torch.cat([rank[name] for rank in saved]) if ".experts." in name else saved[1][name]
        assert value.equal(wanted), name


def too_many(ep):
    try:
        build(ep, num_experts=3)
    except ConfigError as error:
        return error.what
    return None


@pytest.mark.distributed
def test_experts_that_do_not_divide():
    assert "does not divide" in run_ranks(too_many, 2, 2, timeout=120)[0]
