"""What the benchmark of the kernels checks before it measures: on a GPU where there is one, on the host otherwise."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from tests.cuda_host.fake_cupy import host_engine
from tests.cuda_host.memory import Arena
from tests.distributed import ROOT


def _load(name: str) -> ModuleType:
    """A module of benchmarks/, by path: `kernels` is a folder of the checkout too."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


kernels = _load("kernels")
checks = kernels.checks
ON_GPU = torch.cuda.is_available()


@pytest.fixture
def device(monkeypatch) -> torch.device:
    from moeflow.ops import _cupy

    torch.manual_seed(0)
    if ON_GPU:
        reason = _cupy.unavailable()
        if reason is not None:
            pytest.skip(reason)
        return torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(_cupy, "_engine", host_engine(Arena(), seeds=(0,), strict=False))
    return torch.device("cpu")


@pytest.mark.parametrize("size", checks.SIZES if ON_GPU else checks.SIZES[1:3], ids=str)
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("name", checks.CHECKS)
def test_check(name, dtype, size, device):
    checks.CHECKS[name](device, dtype, size)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", checks.ON_GPU)
def test_check_on_gpu(name, device):
    checks.ON_GPU[name](device)


def test_a_check_notices_a_wrong_kernel(device, monkeypatch):
    from moeflow.ops import kernel_calls

    right = kernel_calls.combine
    monkeypatch.setattr(kernel_calls, "combine", lambda rows, row_of, weights: right(rows, row_of, weights) * 1.0001)
    with pytest.raises(AssertionError, match="combine: relative error"):
        checks.rows(device, torch.float32, checks.SIZES[2])


def test_dry_run_of_the_benchmark(device, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "check", lambda device: [])  # the tests above
    path = tmp_path / "kernels.json"
    assert kernels.main(["--dry-run", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["dry_run"] and len(found["kernels"]) == 11 and len(found["layers"]) == 1
    assert {"triton", "transformer engine"} == set(found["kernels"][4]["others"])
    printed = capsys.readouterr().out
    assert printed.count("\n| ") == len(found["kernels"]) + len(found["layers"]) + 2  # rows, and two headers
    monkeypatch.setattr(kernels, "check", lambda device: ["gate"])
    monkeypatch.setattr(kernels, "cases", lambda *_: [])
    assert kernels.main(["--dry-run"]) == 1


@pytest.mark.parametrize(("share", "routing", "layer", "met"), [(0.9, 0.05, 0.8, True), (0.8, 0.2, 0.7, False)])
def test_goals(share, routing, layer, met):
    rows = [
        {"kernel": name, "size": "T", "share_of_copy": share}
        for name in ("dispatch", "combine", "combine backward", "dispatch backward")
    ]
    results = {"kernels": rows, "layers": [{"gate_and_plan": routing, "share_of_dense": layer}]}
    assert list(kernels.goals(results).values()) == [met] * 3


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "kernels.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and "torch sees no CUDA device" in done.stderr


BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ImportError(f"{{name}} is not installed here")
sys.meta_path.insert(0, Blocked())
import moeflow.ops, moeflow.ops._cupy, moeflow.ops.kernel_calls, moeflow.moe
import torch
from moeflow import ops
plan = ops.make_plan(torch.tensor([[0], [1]]), 2)
x = torch.randn(2, 3)
assert torch.equal(ops.combine(ops.dispatch(x, plan), plan), x)
assert moeflow.ops._cupy.unavailable()
"""


def test_ops_need_torch_and_cupy_alone():
    names = ("hydra", "omegaconf", "accelerate", "deepspeed", "transformers", "rich", "yaml", "tensorboard", "PIL")
    code = BLOCK.format(names=(*names, *(() if ON_GPU else ("cupy",))))
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
