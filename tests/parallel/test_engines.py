"""DeepSpeed and FSDP2 do the mathematics of the plain engine: losses, norms, parameters; and they cut what they say."""

from __future__ import annotations

import pytest
import torch

from moeflow.parallel.engines import make_engine
from moeflow.parallel.prepare import leave
from moeflow.schema import BalanceConfig, OptimConfig, OverlapConfig, PrecisionConfig
from moeflow.schema.gate import CosineGateConfig
from moeflow.train.optim import build_optimizer
from moeflow.train.session import join, open_session
from tests.distributed import run_ranks
from tests.parallel.gpt_run import config_of, train

MODEL = {"num_layers": 2, "num_experts": 4, "d_hidden": 32}
ZERO = {"engine": "deepspeed", "ep": 2}
SHADOWS = BalanceConfig(shadow=True, fixed_shadows=[0, 3])
QUICK = [
    (2, {**ZERO, "zero_stage": 1}, {"grad_accum": 2}),
    (4, {**ZERO, "zero_stage": 2}, {}),  # edp 2
    (4, {"engine": "fsdp", "ep": 2}, {"grad_accum": 2}),  # edp 2
]
SLOW = [
    (2, {**ZERO, "zero_stage": 2}, {}),
    (2, {"engine": "fsdp", "ep": 2}, {"grad_accum": 2}),
    (4, {"engine": "fsdp", "ep": 2}, {}),
    (1, {"engine": "deepspeed", "zero_stage": 2}, {}),
    (2, {**ZERO, "zero_stage": 0}, {"grad_accum": 2}),
    (4, {**ZERO, "zero_stage": 0}, {}),
    (4, {**ZERO, "zero_stage": 1}, {}),
    (4, {"engine": "deepspeed", "zero_stage": 1, "ep": 4}, {}),
    (2, {"engine": "deepspeed", "zero_stage": 2}, {"grad_accum": 2}),
    (3, {"engine": "deepspeed", "zero_stage": 2}, {"batch": 12}),  # pieces that end anywhere
    (1, {"engine": "fsdp"}, {}),
    (2, {"engine": "fsdp"}, {}),
    (3, {"engine": "fsdp"}, {"batch": 12}),  # experts that three ranks cannot cut stay whole
    (4, {"engine": "fsdp", "ep": 4}, {}),
    (2, {**ZERO, "zero_stage": 2}, {"gate": CosineGateConfig()}),  # has a parameter that is one number
    (4, {"engine": "fsdp", "ep": 2}, {"gate": CosineGateConfig()}),
    (4, {**ZERO, "zero_stage": 2}, {"overlap": OverlapConfig(chunks="2")}),
    (2, {"engine": "fsdp", "ep": 2}, {"overlap": OverlapConfig(chunks="2")}),  # whole experts: edp is 1
    (4, {**ZERO, "zero_stage": 1}, {"balance": SHADOWS}),
    (2, {"engine": "fsdp", "ep": 2}, {"balance": SHADOWS}),
]


def result(parallel, more):
    more, batch = dict(more), more.get("batch", 16)
    more.pop("batch", None)
    return train(parallel, steps=8, model=MODEL, batch_size=batch, **more)


@pytest.fixture(scope="module")
def plain():
    made = {}

    def get(more):
        # One process has nobody to exchange with.
        more = {key: value for key, value in more.items() if key not in ("overlap", "balance")}
        key = repr(more)
        if key not in made:
            made[key] = run_ranks(result, 1, {}, more, timeout=60, init=False)[0]
        return made[key]

    return get


def largest(found, wanted):
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def check(world, parallel, more, plain, tolerance=1e-5):
    losses, norms, parameters = plain(more)
    for rank in run_ranks(result, world, parallel, more, timeout=120, init=False):
        assert largest(rank[0], losses) < tolerance
        assert largest(rank[1], norms) < 10 * tolerance
        # With ZeRO a rank has the parameters that it owns.
        for name, value in rank[2].items():
            assert (value - parameters[name]).norm() <= tolerance * parameters[name].norm() + 1e-9, name
        yield rank[2].keys()


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "parallel", "more"), QUICK, ids=str)
def test_an_engine_follows_the_plain_one(world, parallel, more, plain):
    assert set().union(*check(world, parallel, more, plain)) == plain(more)[2].keys()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("world", "parallel", "more"), SLOW, ids=str)
def test_every_engine_follows_the_plain_one(world, parallel, more, plain):
    assert set().union(*check(world, parallel, more, plain)) == plain(more)[2].keys()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("world", "parallel"), [(w, p) for w, p, _ in QUICK], ids=str)
def test_momentum_and_no_clipping(world, parallel, plain):
    more = {"optim": OptimConfig(name="sgd", lr=0.1, clip_norm=None)}
    assert list(check(world, parallel, more, plain))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, {**ZERO, "zero_stage": stage}) for stage in (0, 1, 2)] + [(4, {"engine": "fsdp", "ep": 2})],
    ids=str,
)
def test_bf16(world, parallel):
    more = {"precision": PrecisionConfig("bf16"), "grad_accum": 2}
    wanted = run_ranks(result, 2, {"ep": 2}, more, timeout=60, init=False)[0]
    for losses, norms, parameters in run_ranks(result, world, parallel, more, timeout=120, init=False):
        assert largest(losses, wanted[0]) < 0.01 and largest(norms, wanted[1]) < 0.2
        # A checkpoint holds fp32, whatever the model computes in.
        assert {tensor.dtype for tensor in parameters.values()} == {torch.float32}


def held(parallel):
    """(numbers of parameters, of gradients, of optimizer state) that stay on this rank between two steps."""
    config = config_of(parallel, model=MODEL)
    accelerator, topology = join(config)
    session = open_session(config, accelerator, topology)
    engine = make_engine(
        config, accelerator, topology, session.part, lambda model, split: build_optimizer(model, config.optim, split)
    )
    numel = sum(p.numel() for p in session.model.parameters())
    whole = sum(shape.numel() for shape in session.part.full_shapes.values())
    inputs = torch.randint(0, 8, (4, 16))
    with engine.micro_batch(last=True):
        engine.backward(engine.model(inputs).square().mean())
    _, taken = engine.step()
    assert taken

    def local(tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    parameters = sum(local(p).numel() for p in session.model.parameters())
    state = sum(local(v).numel() for s in engine.optimizer.state.values() for v in s.values() if v.ndim)
    leave()
    return whole, numel, parameters, state


@pytest.mark.slow
@pytest.mark.distributed
def test_what_a_rank_keeps():
    plain = run_ranks(held, 2, {"ep": 2}, timeout=60, init=False)[0]
    whole, rank, parameters, state = plain
    assert whole > rank == parameters and state == 2 * rank
    for name, world, parallel in (
        ("zero", 4, {**ZERO, "zero_stage": 1}),
        ("fsdp", 4, {"ep": 2, "engine": "fsdp"}),
    ):
        found = run_ranks(held, world, parallel, timeout=60, init=False)
        # Of four ranks each keeps a quarter of the optimizer state of the whole model, but for padding.
        assert all(abs(state - 2 * whole / 4) < 0.03 * whole for _, _, _, state in found), name
        kept = {parameters for _, _, parameters, _ in found}
        assert kept == {rank} if name == "zero" else all(abs(n - whole / 4) < 0.03 * whole for n in kept)


def norms(stage, ep):
    """The norm of one gradient: ours, and DeepSpeed's own."""
    from moeflow.parallel.engines import deepspeed

    plain = deepspeed.deepspeed_config

    def measuring(*arguments):
        settings = plain(*arguments)
        settings["zero_optimization"].pop("compute_grad_norm", None)
        return settings

    deepspeed.deepspeed_config = measuring
    config = config_of({"engine": "deepspeed", "zero_stage": stage, "ep": ep}, optim=OptimConfig(clip_norm=None))
    accelerator, topology = join(config)
    session = open_session(config, accelerator, topology)
    engine = make_engine(
        config, accelerator, topology, session.part, lambda model, split: build_optimizer(model, config.optim, split)
    )
    tokens = torch.randint(0, 8, (8, 16), generator=torch.Generator().manual_seed(0))
    with engine.micro_batch(last=True):
        engine.backward(engine.model(tokens.chunk(topology["dp"].size)[topology["dp"].rank]).square().mean())
    theirs = None
    if stage == 0:
        from deepspeed.runtime.utils import clip_grad_norm_

        theirs = clip_grad_norm_(session.model.parameters(), max_norm=1e9)
    ours, _ = engine.step()
    theirs = engine.engine.optimizer._global_grad_norm if theirs is None else theirs
    leave()
    return float(ours), float(theirs)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_deepspeeds_own_norm_is_ours_but_for_stage_0(stage, world):
    """Stage 0 averages the norms of ranks that hold different experts: why the engine clips by itself."""
    (alone, same) = run_ranks(norms, 1, stage, 1, timeout=60, init=False)[0]
    assert same == pytest.approx(alone, rel=1e-6)
    for ours, theirs in run_ranks(norms, world, stage, 2, timeout=60, init=False):
        assert ours == pytest.approx(alone, rel=1e-6)
        assert (theirs == pytest.approx(alone, rel=1e-6)) == (stage > 0)
