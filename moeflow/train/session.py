"""Everything that training and evaluation have in common, built once in each process.

configuration -> Accelerator -> topology -> data -> model (this rank's part) -> prepared for its precision
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import cast

import torch
from accelerate import Accelerator
from torch import nn

from moeflow import data
from moeflow.data import DataBundle
from moeflow.errors import ConfigError, DataError, MoeflowError
from moeflow.models import build_model
from moeflow.models.tasks import Task
from moeflow.ops import backend
from moeflow.parallel.balance import Balance
from moeflow.parallel.collectives import gather_objects
from moeflow.parallel.control import control_group
from moeflow.parallel.exchange import expert_shape, set_exchange
from moeflow.parallel.nodes import own_profile
from moeflow.parallel.parallelize import Part, moe_layers, parallelize
from moeflow.parallel.pipeline import StageRange, keep_own_layers, own_ranges, stage_ranges
from moeflow.parallel.prepare import make_accelerator, meeting
from moeflow.parallel.topology import Topology
from moeflow.plan.cost import ExpertShape
from moeflow.schema import RunConfig
from moeflow.train.memory import check_room

# Seconds that ranks wait for rank 0, which may download and unpack.
DOWNLOAD_S = 3600.0


@dataclass
class Session:
    """One process's part of a run.

    Attributes:
        config: the frozen configuration.
        accelerator: device, precision, accumulation.
        topology: layout and groups.
        data: training and evaluation sets.
        part: this rank's part of the model, with initial values.
        balance: of its MoE layers; does nothing unless it was asked for.
        stages: pipeline stages of this rank; empty without a pipeline.
        num_stages: pipeline stages in all.
    """

    config: RunConfig
    accelerator: Accelerator
    topology: Topology
    data: DataBundle
    part: Part
    balance: Balance
    stages: list[StageRange]
    num_stages: int = 1

    @property
    def model(self) -> nn.Module:
        """This rank's part of the model."""
        return self.part.model

    @property
    def task(self) -> Task:
        """Loss and metrics of the model."""
        return cast(Task, self.model.task)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def dp_size(self) -> int:
        """Ranks that the samples are shared out over."""
        return self.topology["dp"].size

    @property
    def micro_batch(self) -> int:
        """Samples of one micro-batch on one rank."""
        return self.config.data.batch_size // (self.dp_size * self.config.trainer.grad_accum)


def set_threads(config: RunConfig) -> None:
    """Share the cores out among the processes of this machine, unless something else already has.

    OMP_NUM_THREADS is set too, because Accelerate would otherwise choose by itself, with a warning.
    """
    if config.launch.threads is not None:
        threads = _at_most_cores(config.launch.threads)
    elif "OMP_NUM_THREADS" in os.environ:
        threads = _openmp_threads(os.environ["OMP_NUM_THREADS"])
    else:
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        threads = max(1, len(os.sched_getaffinity(0)) // local_world)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def _at_most_cores(threads: int) -> int:
    cores = os.cpu_count() or 1
    if threads > cores:
        raise ConfigError(
            f"launch.threads={threads}: threads of each process, at most the {cores} cores of this machine",
            f"launch.threads={cores}, or leave it out",
        )
    return threads


def _openmp_threads(text: str) -> int:
    """The number of threads in OMP_NUM_THREADS, which may hold one for each level of nesting ("4,2")."""
    first = text.partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise ConfigError(
            f"the environment variable OMP_NUM_THREADS={text!r} must be a whole number of at least 1",
            "unset OMP_NUM_THREADS, or launch.threads=N",
        )
    return int(first)


def join(config: RunConfig) -> tuple[Accelerator, Topology]:
    """Join the process group that the launcher prepared, if any, and form the groups of the layout.

    Raises:
        LaunchError: the ranks did not find one another in time.
    """
    set_threads(config)
    backend.request(config.ops.backend)
    with meeting(config.launch.timeout_s):
        accelerator = make_accelerator(config)
        return accelerator, Topology.create(config.parallel, config.launch.timeout_s)


def open_session(config: RunConfig, accelerator: Accelerator, topology: Topology, training: bool = True) -> Session:
    """Build data and model.

    Args:
        config: the frozen configuration.
        accelerator: of this process.
        topology: of this rank.
        training: whether gradients and optimizer state will be needed too.

    Raises:
        MoeflowError: whatever of the configuration cannot be run here.
    """
    torch.manual_seed(config.run.seed)
    bundle = _build_data(config, topology)
    _check_sizes(config, topology, bundle)
    with torch.device("meta"):
        model = build_model(config.model, config.gate)
    stages, ranges = [], []
    if topology["pp"].size > 1:
        ranges = stage_ranges(model, config.parallel)
        stages = own_ranges(ranges, topology)
        keep_own_layers(model, stages)
    check_room(model, config, topology, accelerator.device, training)
    part = parallelize(model, topology, config.run.seed, accelerator.device, config.parallel.sequence_parallel)
    balance = Balance(topology, config.balance)
    if config.overlap.active or config.balance.active:
        profile = own_profile(config.balance.profile, accelerator.device, topology["world"])
        set_exchange(model, topology, config.overlap, profile, config.launch.timeout_s)
        micro_batches = config.trainer.grad_accum * pipeline_microbatches(config)
        balance = Balance.of(model, topology, config.balance, profile, config.precision.dtype, micro_batches)
    # Streams of noise (dropout, gate noise) differ between ranks that hold different samples.
    torch.manual_seed(config.run.seed + 1 + topology["stage"].rank)
    return Session(config, accelerator, topology, bundle, part, balance, stages, len(ranges) or 1)


def _build_data(config: RunConfig, topology: Topology) -> DataBundle:
    """Rank 0 first: it may have to download, and the others then find the files.

    What one rank meets is raised on all of them, so that none waits for a rank that has gone.
    """
    # Of its own, because a download may take longer than a collective of training.
    group = control_group(timeout_s=DOWNLOAD_S)
    bundle = None
    for turn in (topology.is_main, not topology.is_main):
        failure = None
        if turn:
            try:
                bundle = data.build(config.data, config.run.seed)
            except MoeflowError as error:
                failure = error
        failures = gather_objects(failure, group)
        if any(failures):
            raise next(error for error in failures if error is not None)
    assert bundle is not None
    seen = gather_objects(bundle.fingerprint, group)
    if len(set(seen)) > 1:
        told = ", ".join(f"rank {rank}: {fingerprint}" for rank, fingerprint in enumerate(seen))
        raise DataError(
            f"the ranks see different data: {told}", "give all machines the same files (data.root, data.path)"
        )
    return bundle


def _check_sizes(config: RunConfig, topology: Topology, bundle: DataBundle) -> None:
    parts = topology["dp"].size * config.trainer.grad_accum * pipeline_microbatches(config)
    if config.data.batch_size % parts:
        raise ConfigError(
            f"data.batch_size={config.data.batch_size}: must be a multiple of dp * trainer.grad_accum * "
            f"parallel.pp_microbatches = {parts}",
            f"data.batch_size={-(-config.data.batch_size // parts) * parts}",
        )
    _check_kind(config, bundle)
    classes = getattr(config.model, "num_classes", None)
    if classes is not None and bundle.num_classes is not None and classes < bundle.num_classes:
        raise ConfigError(
            f"model.num_classes={classes}: the data have {bundle.num_classes} classes",
            f"model.num_classes={bundle.num_classes}",
        )
    if getattr(config.model, "vocab_size", 0) is None:
        config.model.vocab_size = bundle.vocab_size  # type: ignore[attr-defined]
    vocabulary = getattr(config.model, "vocab_size", None)
    if vocabulary is not None and bundle.vocab_size is not None and vocabulary < bundle.vocab_size:
        raise ConfigError(
            f"model.vocab_size={vocabulary}: the data have {bundle.vocab_size} tokens", "model.vocab_size=null"
        )


def _check_kind(config: RunConfig, bundle: DataBundle) -> None:
    """Refuse a network for images on a text, and the other way about."""
    for kind, key, has in (("classes", "num_classes", bundle.num_classes), ("tokens", "vocab_size", bundle.vocab_size)):
        if hasattr(config.model, key) and has is None:
            model, data = ("gpt", "cifar10") if kind == "classes" else ("convnet", "text")
            raise ConfigError(
                f"model={config.model.name} predicts {kind}, and data={config.data.name} has none",
                f"data={data}, or model={model}",
            )


def pipeline_microbatches(config: RunConfig) -> int:
    """Parts that a pipeline cuts each micro-batch of a rank into; 1 without a pipeline."""
    if config.parallel.pp == 1:
        return 1
    return config.parallel.pp_microbatches or config.parallel.pp


def expert_of(config: RunConfig, topology: Topology) -> ExpertShape:
    """Sizes of one expert of the first MoE layer, as a rank of this layout holds it.

    Raises:
        ConfigError: the model has no MoE layer.
    """
    model_config = copy.copy(config.model)
    if getattr(model_config, "vocab_size", 0) is None:
        model_config.vocab_size = 256  # type: ignore[attr-defined]  # of no matter to an expert
    with torch.device("meta"):
        layers = moe_layers(build_model(model_config, config.gate))
    if not layers:
        raise ConfigError(f"model={config.model.name} has no MoE layer", "a recipe with experts")
    layer = next(iter(layers.values()))
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision.dtype, torch.float32)
    return expert_shape(layer.experts, layer.d_model, dtype, topology["etp"].size)


def set_aux_loss_scale(model: nn.Module, scale: float) -> None:
    """Tell every MoE layer what the main loss is multiplied by before backward."""
    for layer in moe_layers(model).values():
        layer.aux_loss_scale = scale
