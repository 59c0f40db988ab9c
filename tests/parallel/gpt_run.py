"""A small gpt_moe trained on one process or on a layout of several: what the parity matrix compares."""

from __future__ import annotations

import torch

from moeflow.data.loader import train_batches
from moeflow.parallel.engines import make_engine
from moeflow.parallel.prepare import leave
from moeflow.schema import (
    GPTConfig,
    LaunchConfig,
    NaiveGateConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    RunSection,
    TextData,
    TrainerConfig,
)
from moeflow.train.optim import build_optimizer
from moeflow.train.session import join, open_session
from moeflow.train.step import batch_means, make_stepper

STEPS = 20


def config_of(parallel: dict, **more) -> RunConfig:
    """Two layers of each kind, four experts, top-2, load-balance loss on, dropless, clipping."""
    model = {"num_layers": 4, "d_model": 32, "num_heads": 4, "d_hidden": 32, "num_experts": 4, "moe_every": 2}
    gate = more.pop("gate", {})
    if isinstance(gate, dict):
        gate = NaiveGateConfig(**{"load_balance_coef": 0.05, "load_balance_scope": "sequence", **gate})
    return RunConfig(
        run=RunSection(seed=3),
        model=GPTConfig(**{**model, **more.pop("model", {})}),
        gate=gate,
        parallel=ParallelConfig(**parallel),
        data=TextData(source="synthetic", seq_len=16, batch_size=more.pop("batch_size", 16)),
        optim=more.pop("optim", OptimConfig(lr=3e-3, clip_norm=0.5)),
        trainer=TrainerConfig(max_steps=STEPS, grad_accum=more.pop("grad_accum", 1)),
        launch=LaunchConfig(device="cpu", threads=1, timeout_s=60.0),
        **more,
    )


def train(parallel: dict, steps: int = STEPS, **more) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train in this process's place of the layout.

    Returns:
        losses of the whole batch, gradient norms, and this rank's parameters, whole, by global name.
    """
    config = config_of(parallel, **more)
    accelerator, topology = join(config)
    session = open_session(config, accelerator, topology)
    engine = make_engine(
        config, accelerator, topology, session.part, lambda model, split: build_optimizer(model, config.optim, split)
    )
    stepper = make_stepper(session, engine)
    batches = train_batches(
        session.data.train,
        micro_batch=session.micro_batch,
        dp_size=session.dp_size,
        dp_rank=topology["dp"].rank,
        seed=config.run.seed,
        start=0,
        device=session.device,
    )
    losses, norms = [], []
    for step in range(1, steps + 1):
        output = stepper.step(batches)
        session.balance.end_step(step, engine.optimizer)
        here = not session.stages or session.stages[-1].last
        sums = {"loss": torch.stack([output.loss, torch.ones(())])} if here else {}
        losses.append(batch_means(session, sums)["loss"])
        norms.append(output.norm.item())
    with session.balance.at_home(engine.optimizer):
        whole = {
            name: t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
            for name, t in engine.tensors().items()
            if name.startswith("model/")
        }
    leave()
    return losses, norms, whole
