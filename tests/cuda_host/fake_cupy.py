"""The few CuPy calls that moeflow makes, executed on the host: `Engine(FakeCupy(...))` runs real launch code.

A launch is repeated under several orders of blocks and threads, from the same state of memory, and every output must
come out with the same bits; every pointer must belong to a guarded tensor.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import torch

from moeflow.ops._cupy import Engine, source_code
from tests.cuda_host.host import HostError, HostModule
from tests.cuda_host.instances import INSTANCES
from tests.cuda_host.memory import Arena


class FakeCupy:
    """Stands for the module `cupy`.

    Args:
        arena: owner of every tensor that kernels may touch.
        seeds: schedules that each launch runs under.
        defines: compiler options, such as -DMOEFLOW_ARCH=700.
        edit: changes a source before it is compiled (to plant a fault).
        strict: whether inputs must be guarded too; autograd makes tensors that are not.
    """

    def __init__(self, arena: Arena, seeds=(0, 1, 2, 3), defines=(), edit=None, strict=True):
        self.arena, self.seeds, self.defines, self.edit = arena, tuple(seeds), tuple(defines), edit
        self.strict = strict
        self.launches: list[str] = []
        self.cuda = SimpleNamespace(
            Device=_Device,
            compiler=SimpleNamespace(CompileException=ZeroDivisionError),
        )

    def RawModule(self, *, code, options, backend, name_expressions):
        assert backend == "nvrtc" and "-std=c++17" in options
        return _Module(self, code if self.edit is None else self.edit(code), name_expressions)


class _Device(nullcontext):
    def __init__(self, index: int):
        super().__init__()
        self.attributes = {"MultiProcessorCount": 1}


_built: dict[tuple, HostModule] = {}


class _Module:
    def __init__(self, owner: FakeCupy, code: str, names):
        self.owner, self.code, self.names = owner, code, tuple(names)

    def get_function(self, name: str):
        names = self.names
        for source, instances in INSTANCES.items():
            if self.code == source_code(source):
                if name not in instances:
                    raise HostError(f"{name} is not listed in tests/cuda_host/instances.py")
                # One run of g++ for a kernel's variants of one dtype costs little more than one for a single variant.
                names = tuple(each for each in instances if _group(each) == _group(name))
        key = (self.code, names, self.owner.defines)
        if key not in _built:
            _built[key] = HostModule(self.code, names, self.owner.defines, "-".join(_group(name)))
        return _Function(self.owner, _built[key], name)


def _group(name: str) -> tuple[str, str]:
    kernel, _, template = name.removeprefix("moeflow::").partition("<")
    dtype = next((each for each in ("float", "bf16", "fp16") if each in template), "any")
    return kernel.partition("_")[0], dtype


class _Function:
    def __init__(self, owner: FakeCupy, module: HostModule, name: str):
        self.owner, self.module, self.name = owner, module, name

    def __call__(self, grid, block, args, *, shared_mem, stream):
        arena = self.owner.arena
        for i, value in enumerate(args):
            if self.owner.strict and type(value) is int and value != 0 and not arena.knows(value):
                raise HostError(f"{self.name}: argument {i} points at no guarded tensor")
        self.owner.launches.append(self.name)
        before = arena.snapshot()
        outcome = None
        for seed in self.owner.seeds:
            arena.restore(before)
            self.module.launch(self.name, grid, block, args, shared_mem, seed)
            arena.check()
            after = arena.snapshot()
            if outcome is not None and after != outcome:
                raise HostError(f"{self.name}: another order of threads gives another result (seed {seed})")
            outcome = after


def host_engine(arena: Arena, **options) -> Engine:
    """An engine whose launches run on the host and whose outputs come from `arena`."""
    return Engine(
        FakeCupy(arena, **options),
        device_type="cpu",
        empty=lambda shape, dtype, device=None: arena.empty(tuple(shape), dtype, "output"),
    )


def with_engine(monkeypatch, arena: Arena, **options) -> Engine:
    """Let `moeflow.ops` call kernels on the host for one test."""
    from moeflow.ops import _cupy

    made = host_engine(arena, **options)
    monkeypatch.setattr(_cupy, "_engine", made)
    return made


def ops_on_kernels(monkeypatch) -> Engine:
    """Let the operators of `moeflow.ops` themselves run on the kernels for one test, on CPU tensors."""
    from moeflow.ops import backend, kernel_calls

    gate_op = sys.modules["moeflow.ops.gate"]
    monkeypatch.setattr(gate_op, "_on_kernels", lambda _, num_experts, k: kernel_calls.gate_fits(num_experts, k))
    monkeypatch.setattr(backend, "use_cupy", lambda _, *arguments: backend.fits(*arguments))
    return with_engine(monkeypatch, Arena(), seeds=(0, 3), strict=False)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, which compare equal where NaNs do."""
    return tensor.contiguous().view(torch.uint8)
