"""Which implementation an operator uses, decided in one place and said aloud.

`auto` takes the CUDA kernels when the tensor is on a CUDA device and CuPy can compile for it, and plain torch
otherwise.  The environment variable MOEFLOW_OPS or the configuration key `ops.backend` overrides the choice.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from moeflow.errors import ConfigError, did_you_mean

CHOICES = ("auto", "torch", "cupy")
OPERATORS = ("top_k", "histogram", "make_plan", "dispatch", "combine", "grouped_mlp")

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
    """Return (implementation, reason) of `operator` on a device type: implementation is "torch" or "cupy"."""
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
    if importlib.util.find_spec("moeflow.ops._cupy") is None or importlib.util.find_spec("cupy") is None:
        if wanted == "cupy":
            raise ConfigError("ops.backend=cupy: CuPy is not installed", "pip install 'moeflow[cuda12]'")
        return "torch", "CuPy is not installed (pip install 'moeflow[cuda12]' or 'moeflow[cuda13]')"
    from moeflow.ops import _cupy

    reason = _cupy.unavailable(operator)
    if reason is None:
        return "cupy", "asked for" if wanted == "cupy" else "CUDA device with CuPy"
    if wanted == "cupy":
        raise ConfigError(f"ops.backend=cupy: {reason}", "leave ops.backend=auto")
    return "torch", reason


def use_cupy(operator: str, tensor: torch.Tensor) -> bool:
    """Whether `operator` runs this project's CUDA kernel on `tensor`."""
    return tensor.is_cuda and choose(operator, "cuda")[0] == "cupy"


def describe(device_type: str) -> list[tuple[str, str, str]]:
    """Return (operator, implementation, reason) for every operator on a device type."""
    return [(operator, *choose(operator, device_type)) for operator in OPERATORS]
