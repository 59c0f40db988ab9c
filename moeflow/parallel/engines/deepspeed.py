"""DeepSpeed's ZeRO 0, 1 and 2: optimizer state (1) and gradients (2) are cut over the ranks that hold a parameter.

    dense parameters    cut over dp; gradients averaged over dp
    expert parameters   cut over edp; gradients summed over edp and divided by dp: DeepSpeed's rule, and ours

DeepSpeed finds the experts by marks on their parameters, and their ranks by the name of a group.  It is given moeflow's
own process groups under that name.  Norm and clipping are done here, for all stages alike: one norm over everything.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from packaging.version import Version
from torch import Tensor, nn

from moeflow.errors import CheckpointError, ConfigError
from moeflow.parallel import collectives, state
from moeflow.parallel.engines.base import (
    Engine,
    OptimizerBuilder,
    Tensors,
    clip_coefficient,
    each_parameter,
    squares_of,
)
from moeflow.parallel.engines.fragments import Fragments, Span
from moeflow.parallel.gradients import Gradients
from moeflow.parallel.parallelize import Part
from moeflow.parallel.prepare import one_process_group, prepare_forward
from moeflow.parallel.sharding import global_names
from moeflow.parallel.topology import Topology
from moeflow.schema import RunConfig
from moeflow.schema.engines import deepspeed_config

EXPERTS = "moeflow_experts"
# The first with all that the engine asks of ZeRO's pieces.
OLDEST = "0.19.8"


def import_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for a device, without its chatter.

    Raises:
        ConfigError: it is not installed.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Its modules log at import; a user who wants to read that sets DeepSpeed's own DS_LOG_LEVEL.
    if "DS_LOG_LEVEL" not in os.environ:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"parallel.engine=deepspeed: DeepSpeed cannot be imported ({error})",
            'pip install "moeflow[deepspeed]" --no-build-isolation, or parallel.engine=fsdp',
        ) from error
    if "DS_LOG_LEVEL" not in os.environ:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if Version(deepspeed.__version__) < Version(OLDEST):
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} is too old: moeflow needs {OLDEST} or newer",
            f'pip install "deepspeed>={OLDEST}" --no-build-isolation',
        )
    # It calls collectives by names that torch is about to change: nothing that a user of moeflow can mend.
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\..* is deprecated", category=FutureWarning)
    return deepspeed


def mark_experts(part: Part) -> None:
    """Mark the parameters of experts as DeepSpeed wants them: not reduced over dp, but over the group of that name."""
    for name, parameter in part.model.named_parameters():
        if part.sharding[name].expert:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = EXPERTS  # type: ignore[attr-defined]


def register_groups(topology: Topology) -> None:
    """Give DeepSpeed the expert groups of a topology, and forget those of an earlier run in this process."""
    from deepspeed.utils import groups

    groups._WORLD_GROUP = None
    tables = (
        ("ep", groups._EXPERT_PARALLEL_GROUP, groups._EXPERT_PARALLEL_GROUP_RANKS),
        ("edp", groups._EXPERT_DATA_PARALLEL_GROUP, groups._EXPERT_DATA_PARALLEL_GROUP_RANKS),
    )
    for axis, by_name, ranks_by_name in tables:
        group = topology[axis]
        by_name.clear()
        ranks_by_name.clear()
        by_name[EXPERTS] = group.process_group or dist.new_group(list(group.ranks), use_local_synchronization=True)
        ranks_by_name[EXPERTS] = list(group.ranks)


def _initialize(config: dict[str, Any], model: nn.Module, optimizer: Any, has_experts: bool, zero: bool) -> Any:
    """What deepspeed.initialize does for a plain model, with three things changed."""
    import deepspeed
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine

    class _Engine(DeepSpeedEngine):
        def _configure_distributed_model(self, model: nn.Module) -> None:
            super()._configure_distributed_model(model)
            # DeepSpeed looks for its own MoE class; ours has no such module.
            self.has_moe_layers = has_experts

        def _broadcast_model(self) -> None:
            """Initial values are the same on all ranks; and DeepSpeed cannot send a parameter that is one number."""

        def _do_optimizer_sanity_check(self, optimizer: Any) -> Any:
            # Otherwise ZeRO-1 in bf16 is another class of DeepSpeed's, which clips by itself.
            return ZERO_OPTIMIZATION if zero else super()._do_optimizer_sanity_check(optimizer)

    backend = deepspeed.get_accelerator().communication_backend_name()
    with contextlib.redirect_stdout(io.StringIO()):  # the builders of its extensions print
        comm.init_distributed(dist_backend=backend, dist_init_required=False)
        try:
            settings = DeepSpeedConfig(config)
        except (ValueError, AssertionError, DeepSpeedConfigError) as error:  # pydantic's is a ValueError
            raise ConfigError(f"DeepSpeed refuses parallel.ds_config: {_said(error)}", "correct the file") from error
        with _local_rank():
            return _Engine(
                None, model, optimizer=optimizer, config=config, config_class=settings, dist_init_required=False
            )


def _said(error: Exception) -> str:
    """What is wrong with a configuration: each key and its fault, where the error tells them apart."""
    if not hasattr(error, "errors"):
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())


@contextlib.contextmanager
def _local_rank() -> Iterator[None]:
    """Set LOCAL_RANK, which DeepSpeed asks for, inside the block: a process that nobody launched has none."""
    given = os.environ.get("LOCAL_RANK")
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        yield
    finally:
        if given is None:
            del os.environ["LOCAL_RANK"]


class DeepSpeed(Engine):
    """What all stages share."""

    def __init__(
        self, config: RunConfig, accelerator: Accelerator, topology: Topology, part: Part, build: OptimizerBuilder
    ):
        super().__init__(config, accelerator, topology, part)
        self._library = import_deepspeed(accelerator.device)
        one_process_group(accelerator.device)
        mark_experts(part)
        register_groups(topology)
        has_experts = any(part.sharding[name].expert for name, _ in each_parameter(part))
        self.optimizer = build(part.model, lambda name, parameter: part.sharding[name].expert)
        for group in self.optimizer.param_groups:
            group["moe"] = getattr(group["params"][0], "allreduce", True) is False
            group["name"] = EXPERTS if group["moe"] else "dense"
        own = torch.tensor(sum(parameter.numel() for _, parameter in each_parameter(part)), device=accelerator.device)
        # The same on all ranks, that all fill their buckets alike.
        numel = int(collectives.all_reduce(own, topology["dp"], "max").item())
        settings = deepspeed_config(config, topology["dp"].size, numel)
        self.names = {id(parameter): name for name, parameter in each_parameter(part)}
        prepare_forward(accelerator, part.model)
        stage = settings["zero_optimization"]["stage"]
        self.model = _initialize(settings, part.model, self.optimizer, has_experts, zero=stage > 0)

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine, which is the model too."""
        return self.model

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        self.engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)


class DeepSpeedPlain(DeepSpeed):
    """Stage 0: nothing is cut; DeepSpeed averages the gradients."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.gradients = Gradients(self.part.model, self.topology, self.part.sharding)

    def step(self) -> tuple[Tensor, bool]:
        norm = self.gradients.norm()
        taken = math.isfinite(norm.item())
        if not taken:
            # Optimizers pass over parameters without a gradient.
            self.engine.zero_grad()
        elif self.config.optim.clip_norm is not None:
            self.gradients.clip(self.config.optim.clip_norm, norm)
        self.engine.step()
        return norm, taken

    def tensors(self) -> Tensors:
        model = self.part.model
        return {
            **state.model_tensors(model, self.placements),
            **state.optimizer_tensors(model, self.optimizer, self.placements),
        }

    def load(self, read: Callable[[Tensors], None], optimizer: bool) -> None:
        if optimizer:
            state.allocate_optimizer_state(self.optimizer)
            read(self.tensors())
        else:
            read(state.model_tensors(self.part.model, self.placements))


class DeepSpeedZero(DeepSpeed):
    """Stages 1 and 2: each rank steps its piece of the fp32 values, and parameters are gathered from the pieces."""

    def __init__(
        self, config: RunConfig, accelerator: Accelerator, topology: Topology, part: Part, build: OptimizerBuilder
    ):
        # What is not trained has no fp32 piece, and DeepSpeed casts it too.
        self.frozen = {n: p.detach().clone() for n, p in part.model.named_parameters() if not p.requires_grad}
        super().__init__(config, accelerator, topology, part, build)
        self.zero = self.engine.optimizer
        self.global_names = global_names(self.part.model, self.names.values())
        self.fragments = [self._fragments(number) for number in range(len(self.zero.bit16_groups))]

    def _fragments(self, number: int) -> Fragments:
        zero = self.zero
        parameters, offsets = zero.round_robin_bit16_groups[number], zero.round_robin_bit16_offsets[number]
        spans = [Span(self.names[id(p)], p.shape, o, p.numel()) for p, o in zip(parameters, offsets, strict=True)]
        moe = self.optimizer.param_groups[number]["moe"]
        return Fragments(self.topology["edp" if moe else "dp"], int(zero.partition_size[number]), spans)

    def step(self) -> tuple[Tensor, bool]:
        zero = self.zero
        grads = [grad for number in range(len(self.fragments)) for grad in zero.averaged_gradients[number]]
        # The pieces of dense parameters over dp, and those of experts over edp and ep, lie on the ranks of dp once.
        squares = collectives.all_reduce(squares_of(grads, self.accelerator.device), self.topology["dp"])
        norm = squares.sqrt().float()
        taken = math.isfinite(norm.item())
        if not taken:
            # DeepSpeed's own way to leave a step out, which every rank must go.
            grads[0].fill_(float("nan"))
            zero.check_grad_overflow = True
        elif self.config.optim.clip_norm is not None:
            torch._foreach_mul_(grads, clip_coefficient(self.config.optim.clip_norm, norm))
        self.engine.step()
        zero.check_grad_overflow = False
        return norm, taken

    # --- checkpoints: whole fp32 tensors on the rank that owns the parameter -----------------------------------------

    def _pieces(self, number: int) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's piece of the values of a group, and its optimizer state by key."""
        piece = self.zero.single_partition_of_fp32_groups[number]
        entries = self.optimizer.state.get(piece, {})
        return piece.detach(), {key: value for key, value in entries.items() if isinstance(value, Tensor)}

    def tensors(self) -> Tensors:
        found = self._rest()
        for number, fragments in enumerate(self.fragments):
            piece, entries = self._pieces(number)
            for name, tensor in fragments.gather(piece).items():
                found[self._key(state.MODEL, name)] = self.placements.describe(name, tensor)
            for key, value in entries.items():
                cut = value.ndim > 0
                whole = fragments.gather(value) if cut else {span.name: value.clone() for span in fragments.owned()}
                for name, tensor in whole.items():
                    found[self._key(state.OPTIMIZER, name, key)] = self.placements.describe(name, tensor)
        return found

    def _key(self, kind: str, name: str, *more: str) -> str:
        return "/".join([kind, self.global_names[name], *more])

    def _rest(self) -> Tensors:
        """Buffers, and parameters that are not trained, in fp32."""
        described = {name: self.placements.describe(name, value) for name, value in self.frozen.items()}
        return {
            **state.persistent_buffers(self.part.model),
            **{f"{state.MODEL}/{name}": tensor for name, tensor in described.items()},
        }

    def load(self, read: Callable[[Tensors], None], optimizer: bool) -> None:
        if optimizer:
            state.allocate_optimizer_state(self.optimizer)
        room: Tensors = self._rest()
        whole: dict[tuple[int, str], dict[str, Tensor]] = {}
        for number, fragments in enumerate(self.fragments):
            piece, entries = self._pieces(number)
            for key, value in {"": piece, **(entries if optimizer else {})}.items():
                shaped = {span.name: span.shape if value.ndim else value.shape for span in fragments.owned()}
                made = {name: torch.empty(shape, dtype=value.dtype) for name, shape in shaped.items()}
                whole[number, key] = {name: tensor.to(value.device) for name, tensor in made.items()}
                for name, tensor in whole[number, key].items():
                    full = self._key(state.OPTIMIZER, name, key) if key else self._key(state.MODEL, name)
                    room[full] = self.placements.describe(name, tensor)
        read(room)
        for number, fragments in enumerate(self.fragments):
            piece, entries = self._pieces(number)
            for key, value in {"": piece, **(entries if optimizer else {})}.items():
                if value.ndim:
                    fragments.scatter(whole[number, key], value)
                else:
                    value.fill_(self._one_value(fragments, key, whole[number, key]))
        self.zero.update_lp_params()
        for name, value in self.frozen.items():
            self.part.model.get_parameter(name).detach().copy_(value)

    def _one_value(self, fragments: Fragments, key: str, own: dict[str, Tensor]) -> float:
        """The value that all parameters of a group share, as a count of steps is."""
        told = collectives.gather_objects([value.item() for value in own.values()], fragments.group)
        values = {value for part in told for value in part}
        if len(values) != 1:
            raise CheckpointError(
                f"the optimizer's '{key}' differs between parameters of the checkpoint ({sorted(values)}); ZeRO keeps "
                "one for all",
                "parallel.engine=ddp, or parallel.engine=fsdp",
            )
        return values.pop()
