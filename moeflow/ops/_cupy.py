"""CuPy, the only way to this project's CUDA kernels: compiles a source at first use and launches it on torch tensors.

Nothing is copied between the two libraries: kernels get raw pointers of contiguous tensors, outputs are allocated by
torch, and the launch goes to torch's current stream on the tensor's device.  Compiled kernels are kept by CuPy in
~/.cupy/kernel_cache (CUPY_CACHE_DIR), so that another process does not compile again.

This module needs torch and CuPy alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moeflow.errors import MoeflowError

INSTALL = "pip install cupy-cuda12x (CUDA 12 drivers) or cupy-cuda13x (CUDA 13 drivers)"
OPTIONS = ("-std=c++17",)
CPP_NAME = {
    torch.float32: "float",
    torch.bfloat16: "moeflow::bf16",
    torch.float16: "moeflow::fp16",
}
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)


class KernelError(MoeflowError):
    """A tensor that a kernel cannot take, or a kernel that cannot be compiled."""


@functools.lru_cache(maxsize=1)
def source_folder() -> Path:
    """Folder of the .cu files: inside the package once installed, beside it in a checkout.

    Raises:
        KernelError: it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "kernels", package.parent / "kernels"):
        if (folder / "platform.cuh").is_file():
            return folder
    raise KernelError(
        f"no CUDA sources in {package / 'kernels'} or beside {package}",
        "reinstall moeflow",
    )


@functools.cache
def source_code(name: str) -> str:
    """Text of kernels/NAME.cu with this project's own headers put in their place.

    CuPy keys its cache by the text it compiles, so a header that was only included could change unnoticed.
    """
    seen: set[str] = set()

    def expand(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = (source_folder() / file).read_text(encoding="utf-8")
        body = _INCLUDE.sub(
            lambda match: f'{expand(match[1])}\n#line {_line(text, match)} "{file}"',
            text,
        )
        return f'#line 1 "{file}"\n{body}'

    return expand(f"{name}.cu")


def _line(text: str, match: re.Match[str]) -> int:
    # The directive gives the number of the line after it: the one after the include is one further.
    return text.count("\n", 0, match.start()) + 1


class _ForeignStream:
    """Stream of torch as CuPy's stream protocol wants it."""

    def __init__(self, handle: int):
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


class Engine:
    """Compiles and launches kernels through CuPy.

    Args:
        cupy: the CuPy module.
        device_type: where tensors must lie.
        empty: allocates outputs, with the signature of torch.empty.
    """

    def __init__(
        self,
        cupy: Any,
        device_type: str = "cuda",
        empty: Callable[..., Tensor] = torch.empty,
    ):
        self.cupy = cupy
        self.device_type = device_type
        self.empty = empty
        self._modules: dict[tuple[str, str], Any] = {}
        self._functions: dict[tuple[str, str, int], Any] = {}
        self._streams: dict[tuple[int, int], Any] = {}
        self._processors: dict[int, int] = {}

    def num_blocks(self, wanted: int, device: torch.device, per_processor: int = 8) -> int:
        """Blocks to launch: what is wanted, but no more than fill the device; kernels stride over the rest."""
        index = self._index(device)
        if index not in self._processors:
            attributes = self.cupy.cuda.Device(index).attributes
            self._processors[index] = int(attributes["MultiProcessorCount"])
        return max(1, min(wanted, self._processors[index] * per_processor))

    def launch(
        self,
        device: torch.device,
        source: str,
        kernel: str,
        template: Sequence[str | int],
        grid: int,
        block: tuple[int, int],
        arguments: Sequence[Any],
        shared: int = 0,
    ) -> None:
        """Launch `moeflow::kernel<template...>` of kernels/SOURCE.cu on the current stream of `device`.

        Args:
            grid: blocks.
            block: threads along x and y.
            arguments: tensors (or None for a null pointer), and NumPy scalars of the parameter's own type.
            shared: dynamic shared memory, in bytes.
        """
        index = self._index(device)
        raw = [_raw(argument) for argument in arguments]
        with self.cupy.cuda.Device(index):
            function = self._function(source, kernel, template, index)
            function(
                (grid,),
                block,
                raw,
                shared_mem=shared,
                stream=self._stream(device, index),
            )

    def _index(self, device: torch.device) -> int:
        if device.index is not None:
            return device.index
        return torch.cuda.current_device() if device.type == "cuda" else 0

    def _function(self, source: str, kernel: str, template: Sequence[str | int], index: int) -> Any:
        expression = f"moeflow::{kernel}" + (f"<{', '.join(map(str, template))}>" if template else "")
        key = (source, expression, index)
        if key not in self._functions:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                # Loading a module would end the capture with an error that names nothing.
                raise KernelError(
                    f"{expression} is used for the first time while a CUDA graph is captured: it cannot be loaded",
                    "run one step before the capture",
                )
            try:
                self._functions[key] = self._module(source, expression).get_function(expression)
            except self.cupy.cuda.compiler.CompileException as error:
                raise KernelError(
                    f"kernels/{source}.cu does not compile for this device: {error}",
                    INSTALL,
                ) from error
        return self._functions[key]

    def _module(self, source: str, expression: str) -> Any:
        """One module for each variant; CuPy loads it once for each device."""
        if (source, expression) not in self._modules:
            self._modules[source, expression] = self.cupy.RawModule(
                code=source_code(source),
                options=OPTIONS,
                backend="nvrtc",
                name_expressions=(expression,),
            )
        return self._modules[source, expression]

    def _stream(self, device: torch.device, index: int) -> Any:
        if device.type != "cuda":
            return None
        handle = torch.cuda.current_stream(device).cuda_stream
        if (index, handle) not in self._streams:
            stream = self.cupy.cuda.Stream
            if hasattr(stream, "from_external"):  # CuPy 14
                self._streams[index, handle] = stream.from_external(_ForeignStream(handle))
            else:
                self._streams[index, handle] = self.cupy.cuda.ExternalStream(handle, index)
        return self._streams[index, handle]


def _raw(argument: Any) -> Any:
    if argument is None:
        return 0
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    assert isinstance(argument, np.generic), f"a scalar needs the type of its parameter: {argument!r}"
    return argument


_engine: Engine | None = None


def engine() -> Engine:
    """The engine of this process.

    Raises:
        KernelError: CuPy cannot be used here; the message says what to install.
    """
    global _engine
    if _engine is None:
        reason = unavailable()
        if reason is not None:
            raise KernelError(f"the CUDA kernels cannot run: {reason}", INSTALL)
        import cupy

        _engine = Engine(cupy)
    return _engine


@functools.lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Why the kernels cannot run in this process, or None."""
    try:
        import cupy
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); {INSTALL}"
    try:
        if cupy.cuda.runtime.getDeviceCount() == 0:
            return "CuPy sees no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"the CUDA driver cannot be used ({error}); {INSTALL}"
    try:
        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        return f"NVRTC cannot be loaded ({error}); pip install nvidia-cuda-nvrtc-cu12 (or -cu13)"
    try:
        source_folder()
    except KernelError as error:
        return error.what
    return None
