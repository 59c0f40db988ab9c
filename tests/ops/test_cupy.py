"""Launches as CuPy gets them on CUDA devices: stream, device, modules, capture, and both generations of its stream API.

Nothing is launched: a stand-in for CuPy writes down what it is asked for.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moeflow.ops import _cupy
from moeflow.ops._cupy import Engine, KernelError


class CompileError(Exception):
    """Stands for cupy.cuda.compiler.CompileException."""


class Recorder:
    """A CuPy without a device.

    Args:
        generation: 13 or 14, which make streams differently.
        broken: whether sources fail to compile.
    """

    def __init__(self, generation: int = 14, broken: bool = False):
        self.modules, self.loaded, self.calls, self.streams, self.current = [], [], [], [], []
        self.broken = broken
        stream = type("Stream", (), {})
        if generation >= 14:
            stream.from_external = staticmethod(self.from_external)
        self.cuda = SimpleNamespace(
            Device=self.device,
            Stream=stream,
            ExternalStream=self.external,
            compiler=SimpleNamespace(CompileException=CompileError),
        )

    @contextmanager
    def device(self, index):
        self.current.append(index)
        yield
        self.current.pop()

    def from_external(self, stream):
        self.streams.append(stream.__cuda_stream__())
        return ("from_external", *stream.__cuda_stream__())

    def external(self, handle, index):
        self.streams.append((handle, index))
        return ("external", handle, index)

    def RawModule(self, *, code, options, backend, name_expressions):
        self.modules.append(name_expressions)
        return SimpleNamespace(get_function=self.get_function)

    def get_function(self, name):
        if self.broken:
            raise CompileError("error: no such architecture")
        self.loaded.append((name, self.current[-1]))

        def call(grid, block, args, *, shared_mem, stream):
            self.calls.append((self.current[-1], grid, block, args, shared_mem, stream))

        return call


@pytest.fixture
def streams(monkeypatch) -> dict[int, int]:
    """Handle of torch's current stream on each device."""
    handles = {0: 100, 1: 200}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=handles[device.index]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return handles


def launch(run: Engine, index: int, template=("float", 4, 2)) -> None:
    run.launch(torch.device("cuda", index), "permute", "dispatch_rows", template, 3, (8, 32), (None, np.int64(7)), 16)


@pytest.mark.parametrize("generation", [13, 14])
def test_current_stream_and_device_of_the_tensors(generation, streams):
    cupy = Recorder(generation)
    run = Engine(cupy)
    for index in (0, 1, 1):
        launch(run, index)
    streams[1] = 300
    launch(run, 1)
    want = [(0, 100), (1, 200), (1, 200), (1, 300)]
    made = [("from_external", 0, handle) if generation == 14 else ("external", handle, index) for index, handle in want]
    assert [(call[0], call[-1]) for call in cupy.calls] == [(w[0], m) for w, m in zip(want, made, strict=True)]
    assert cupy.calls[0][1:5] == ((3,), (8, 32), [0, np.int64(7)], 16)
    # One stream object for each handle, one module for each variant, loaded once for each device.
    assert len(cupy.streams) == 3
    assert cupy.modules == [("moeflow::dispatch_rows<float, 4, 2>",)]
    assert [index for _, index in cupy.loaded] == [0, 1]
    launch(run, 0, ("moeflow::bf16", 8, 2))
    assert len(cupy.modules) == 2


def test_nothing_is_loaded_while_a_graph_is_captured(streams, monkeypatch):
    cupy = Recorder()
    run = Engine(cupy)
    launch(run, 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launch(run, 0)
    assert len(cupy.calls) == 2
    with pytest.raises(KernelError, match=r"dispatch_rows<float, 1, 2>.*captured") as error:
        launch(run, 0, ("float", 1, 2))
    assert "before the capture" in str(error.value)
    assert len(cupy.modules) == 1


def test_a_source_that_does_not_compile_names_itself(streams):
    with pytest.raises(KernelError, match=r"kernels/permute\.cu does not compile.*no such architecture"):
        launch(Engine(Recorder(broken=True)), 0)


def test_the_installed_cupy_has_what_is_called():
    cupy = pytest.importorskip("cupy", reason="needs cupy-cuda12x or cupy-cuda13x")
    assert hasattr(cupy.cuda.Stream, "from_external") or hasattr(cupy.cuda, "ExternalStream")
    assert issubclass(cupy.cuda.compiler.CompileException, Exception)
    assert hasattr(cupy.RawModule, "get_function") and hasattr(cupy.cuda.Device, "__enter__")
    # Compiling is put off until a function is asked for: a module can be made without a device.
    made = cupy.RawModule(
        code=_cupy.source_code("regroup"),
        options=_cupy.OPTIONS,
        backend="nvrtc",
        name_expressions=("moeflow::regroup_rows<16, false>",),
    )
    assert made.name_expressions == ("moeflow::regroup_rows<16, false>",)
    assert {"code", "options"} <= set(dir(made)) and inspect.isroutine(made.get_function)
