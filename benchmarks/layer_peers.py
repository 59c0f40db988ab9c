"""One MoE layer each of this project and of those it is measured against, built alike; for `moe_layer.py`.

Each builder takes `Sizes` and returns a module or function from [B, S, D] to [B, S, D].  A peer that is not installed
raises ImportError.  Where a peer needs a GPU for what has nothing to do with the arithmetic, it gets a stand-in.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Sizes:
    """One case. `parameters` collects what the built layer trains."""

    num_experts: int
    kind: str = "relu"  # or "swiglu"
    ep: int = 1
    d_model: int = 512
    d_ffn: int = 2048
    top_k: int = 2
    batch: int = 8
    seq: int = 512
    shared_memory: bool = True
    parameters: list[nn.Parameter] = field(default_factory=list)


Layer = Callable[[Tensor], Tensor]


class _Dense(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        hidden, bias = sizes.top_k * sizes.d_ffn, sizes.kind == "relu"
        self.gate = nn.Linear(sizes.d_model, hidden, bias=False) if sizes.kind == "swiglu" else None
        self.up = nn.Linear(sizes.d_model, hidden, bias=bias)
        self.down = nn.Linear(hidden, sizes.d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(torch.relu(self.up(x)))
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def dense(sizes: Sizes) -> Layer:
    """MLP whose FLOPs are those of the experts that a token goes through."""
    return _kept(_Dense(sizes), sizes)


def moeflow(sizes: Sizes) -> Layer:
    """This project's layer; with ep, its experts shared out as `moeflow train` does."""
    from moeflow import MoELayer

    with torch.device("meta" if sizes.ep > 1 else "cpu"):
        layer = MoELayer(
            sizes.d_model,
            sizes.num_experts,
            d_hidden=sizes.d_ffn,
            gate="naive",
            activation=sizes.kind,
            bias=sizes.kind == "relu",
        )
    if sizes.ep == 1:
        return _kept(layer, sizes)
    from moeflow.parallel.parallelize import parallelize
    from moeflow.parallel.topology import Topology
    from moeflow.schema import ParallelConfig

    module = nn.Sequential(layer)
    parallelize(
        module,
        Topology.create(ParallelConfig(ep=sizes.ep, shared_memory=sizes.shared_memory), 600.0),
        0,
        torch.device("cpu"),
    )
    return _kept(module, sizes)


def deepspeed(sizes: Sizes) -> Layer:
    """DeepSpeed's MoE with the capacity of even routing: exactly T K rows, some tokens are dropped."""
    return _deepspeed(sizes, drop_tokens=True)


def deepspeed_dropless(sizes: Sizes) -> Layer:
    """DeepSpeed's MoE that drops nothing: pads each expert to the busiest one."""
    return _deepspeed(sizes, drop_tokens=False)


def _deepspeed(sizes: Sizes, drop_tokens: bool) -> Layer:
    os.environ["DS_ACCELERATOR"] = "cpu"
    _need(sizes.kind == "relu", "has no SwiGLU expert of its own")
    _gloo()
    from deepspeed import comm
    from deepspeed.moe.layer import MoE

    comm.init_distributed("gloo", verbose=False)
    expert = nn.Sequential(nn.Linear(sizes.d_model, sizes.d_ffn), nn.ReLU(), nn.Linear(sizes.d_ffn, sizes.d_model))
    layer = MoE(
        sizes.d_model,
        expert,
        num_experts=sizes.num_experts,
        ep_size=sizes.ep,
        k=sizes.top_k,
        capacity_factor=1.0,
        drop_tokens=drop_tokens,
        min_capacity=0,
    )
    layer.set_deepspeed_parallelism()
    _kept(layer, sizes)
    return lambda x: layer(x)[0]


def transformers_mixtral(sizes: Sizes) -> Layer:
    """The Mixtral block of Hugging Face, grouped."""
    _need(sizes.kind == "swiglu", "has SwiGLU experts only")
    _need(sizes.ep == 1, "has no expert parallelism on CPU")
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=sizes.d_model,
        intermediate_size=sizes.d_ffn,
        num_local_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k,
    )
    config._experts_implementation = "grouped_mm"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    _kept(block, sizes)

    def run(x: Tensor) -> Tensor:
        out = block(x)
        return out[0] if isinstance(out, tuple) else out

    return run


def megatron(sizes: Sizes) -> Layer:
    """Megatron-Core's layer, one module for each expert (without biases: its own fails in autograd on CPU)."""
    _gloo()
    _stand_in_for_streams()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe_utils.te_general_gemm = None  # left undefined where Transformer Engine is absent
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=sizes.ep)
    gated = sizes.kind == "swiglu"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=sizes.d_model,
        num_attention_heads=8,
        ffn_hidden_size=sizes.d_ffn,
        moe_ffn_hidden_size=sizes.d_ffn,
        num_moe_experts=sizes.num_experts,
        moe_router_topk=sizes.top_k,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=sizes.ep,
        gated_linear_unit=gated,
        activation_func=nn.functional.silu if gated else nn.functional.relu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    layer = MoELayer(config, MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=linears)))
    _kept(layer, sizes)
    return lambda x: layer(x)[0]


LAYERS: dict[str, Callable[[Sizes], Layer]] = {
    "moeflow": moeflow,
    "deepspeed": deepspeed,
    "deepspeed-dropless": deepspeed_dropless,
    "transformers-mixtral": transformers_mixtral,
    "megatron-core": megatron,
}
DROPS = {"deepspeed"}


class NotApplicable(Exception):
    """The peer does not have what the case asks for."""


def _need(condition: bool, lack: str) -> None:
    if not condition:
        raise NotApplicable(lack)


def _kept(module: nn.Module, sizes: Sizes) -> Layer:
    sizes.parameters += list(module.parameters())
    return module


def _gloo() -> None:
    if not torch.distributed.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
            os.environ.setdefault(name, value)
        store = None if "MASTER_PORT" in os.environ else torch.distributed.HashStore()
        if store is None:
            torch.distributed.init_process_group("gloo")
        else:
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


class _Stream:
    """Stands for a CUDA stream."""

    def wait_stream(self, other: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> _Stream:
        return self


def _stand_in_for_streams() -> None:
    torch.cuda.Stream = lambda *args, **kwargs: _Stream()
    torch.cuda.current_stream = lambda *args: _Stream()
    torch.cuda.default_stream = lambda *args: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_device = lambda: torch.device("cpu")


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
