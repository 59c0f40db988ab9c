"""Which implementation an operator uses, decided in one place and said aloud.

`auto` takes the CUDA kernels when the tensor is on a CUDA device and CuPy can compile for it, and plain torch
otherwise.  The environment variable MOEFLOW_OPS or the configuration key `ops.backend` overrides the choice.  The
products of the experts are torch's on every device, by its grouped kernel or by a loop over experts.
"""

from __future__ import annotations

import functools
import os

import torch

from moeflow.errors import ConfigError, did_you_mean
from moeflow.logging import get_logger

CHOICES = ("auto", "torch", "cupy")
OPERATORS = (
    "gate",
    "top_k",
    "histogram",
    "make_plan",
    "limit_by_capacity",
    "dispatch",
    "combine",
    "regroup",
    "activation",
    "grouped_mlp",
)
# What the kernels take beside the device: other dtypes (fp64, for gradient checks) and sizes run as plain torch.
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)

_requested: str | None = None


def request(backend: str | None) -> None:
    """Ask for a backend from the configuration; None or "auto" leaves the choice to MOEFLOW_OPS and the device."""
    global _requested
    _requested = None if backend in (None, "auto") else _checked(backend, "ops.backend")
    choose.cache_clear()


def _checked(backend: str, origin: str) -> str:
    if backend not in CHOICES:
        raise ConfigError(
            f"{origin}={backend!r}: no such backend; valid: {', '.join(CHOICES)}.{did_you_mean(backend, CHOICES)}"
        )
    return backend


@functools.lru_cache(maxsize=64)
def choose(operator: str, device_type: str) -> tuple[str, str]:
    """Return (implementation, reason) of `operator` on a device type.

    The implementation is "torch" or "cupy"; of grouped_mlp on a CUDA device it is "grouped_mm" or "loop".
    """
    if operator == "grouped_mlp" and device_type == "cuda":
        return _products()
    wanted = _requested or _checked(os.environ.get("MOEFLOW_OPS") or "auto", "MOEFLOW_OPS")
    if wanted == "torch":
        return "torch", "asked for"
    if device_type != "cuda":
        if wanted == "cupy":
            raise ConfigError(
                f"ops.backend=cupy: the kernels need a CUDA device, and the tensors are on {device_type!r}",
                "leave ops.backend=auto, or run on a GPU",
            )
        return "torch", f"device is {device_type}"
    from moeflow.ops import _cupy

    reason = _cupy.unavailable()
    if reason is None:
        return "cupy", "asked for" if wanted == "cupy" else "CUDA device with CuPy"
    if wanted == "cupy":
        raise ConfigError(f"ops.backend=cupy: {reason}", "leave ops.backend=auto")
    _warn(reason)
    return "torch", reason


def _products() -> tuple[str, str]:
    """How the experts' matrices are multiplied on CUDA devices, and why."""
    name = next((n for n in ("torch.nn.functional.grouped_mm", "torch._grouped_mm") if _exists(n)), None)
    if name is None:
        return "loop", f"torch {torch.__version__} has no grouped_mm"
    capability = torch.cuda.get_device_capability()
    if capability < (9, 0):
        # torch itself runs a loop there, which waits for the device as ours does.
        return "loop", f"{name} has no kernel for compute capability {capability[0]}.{capability[1]}, only from 9.0 on"
    return "grouped_mm", f"{name} in bf16 where sizes are multiples of 8, else a loop over experts"


def _exists(dotted: str) -> bool:
    found: object = torch
    for part in dotted.split(".")[1:]:
        found = getattr(found, part, None)
    return found is not None


@functools.cache
def _warn(reason: str) -> None:
    get_logger(__name__).warning("the CUDA kernels are not used, plain torch is, which is slower: %s", reason)


def use_cupy(operator: str, tensor: torch.Tensor, num_experts: int | None = None, k: int | None = None) -> bool:
    """Whether `operator` runs this project's CUDA kernel on `tensor`.

    Args:
        operator: one of OPERATORS.
        tensor: its first argument.
        num_experts: E, for the operators that depend on it.
        k: choices per token, for top_k.
    """
    if not tensor.is_cuda or choose(operator, "cuda")[0] != "cupy":
        return False
    return fits(tensor, num_experts, k)


def fits(tensor: torch.Tensor, num_experts: int | None = None, k: int | None = None) -> bool:
    """Whether the kernels take a tensor's dtype, and these sizes."""
    if tensor.dtype not in (_FLOATS if tensor.is_floating_point() else _INTEGERS):
        return False
    if num_experts is None:
        return True
    from moeflow.ops import kernel_calls

    return kernel_calls.plan_fits(num_experts) if k is None else kernel_calls.gate_fits(num_experts, k)


def describe(device_type: str) -> list[tuple[str, str, str]]:
    """Return (operator, implementation, reason) for every operator on a device type."""
    return [(operator, *choose(operator, device_type)) for operator in OPERATORS]
