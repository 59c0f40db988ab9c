"""Bodies of the doctor's trials: `python -m moeflow.cli.doctor.trials NAME` tries one thing and prints what it saw.

Each runs in a process of its own, so that a crash or a hang of one is a finding and not the end of the report.  The
last line on stdout is JSON; an exception, with its traceback on stderr, is a failed trial.

This module alone may import every part of moeflow and every third party: trying them is what it is for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODULE = "moeflow.cli.doctor.trials"
MARK = "trial-result "


def torch_() -> dict[str, Any]:
    """Import torch and differentiate something."""
    import torch
    import torch.distributed as dist

    x = torch.ones(8, 8, requires_grad=True)
    (x @ x).sum().backward()
    assert x.grad is not None and float(x.grad[0, 0]) == 16.0, "a gradient is wrong"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    backends = [
        name for name, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there
    ]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": devices,
        "detail": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {', '.join(backends)}",
    }


def layer() -> dict[str, Any]:
    """One forward and backward pass of an MoE layer."""
    import torch

    from moeflow import MoELayer
    from moeflow.ops.backend import describe
    from moeflow.schema import SwitchGateConfig

    layer = MoELayer(16, 4, d_hidden=32, gate=SwitchGateConfig())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    y = layer(torch.randn(32, 16))
    y.square().mean().backward()
    assert y.isfinite().all(), "the output is not finite"
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters()), "a gradient is missing"
    used = sorted({f"{implementation}: {reason}" for _, implementation, reason in describe("cpu")})
    return {"detail": f"forward and backward of 4 experts ({'; '.join(used)})"}


def config() -> dict[str, Any]:
    """Compose the main recipe."""
    from moeflow.config import compose

    compose(["+recipe=cifar_moe"])
    return {"detail": "+recipe=cifar_moe composes"}


def accelerate() -> dict[str, Any]:
    """Make an Accelerator on CPU and prepare a model."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    return {"detail": "one step through Accelerator on CPU"}


def gloo() -> dict[str, Any]:
    """Two processes: an all-reduce and an all-to-all of uneven parts."""
    return _ranks("gloo", 2)


def nccl() -> dict[str, Any]:
    """One process on each of the first two GPUs: the same collectives."""
    import torch

    return _ranks("nccl", min(2, torch.cuda.device_count()))


def _ranks(backend: str, world: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", MODULE, "_rank", backend]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    try:
        codes = [rank.wait() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")
    return {"detail": f"all-reduce and uneven all-to-all, {world} process{'es' if world > 1 else ''}"}


def _rank(backend: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group(backend, timeout=timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    total = torch.tensor(float(rank + 1), device=device)
    dist.all_reduce(total)
    assert float(total) == world * (world + 1) / 2, "an all-reduce is wrong"
    # Rank r sends r + peer rows to each peer, so the parts differ, and one of them is empty.
    counts = [rank + peer for peer in range(world)]
    sent = torch.full((sum(counts), 3), float(rank), device=device)
    received = torch.empty(sum(counts), 3, device=device)
    dist.all_to_all_single(received, sent, counts, counts)
    expected = [float(peer) for peer in range(world) for _ in range(rank + peer)]
    assert received[:, 0].tolist() == expected, "an all-to-all is wrong"
    dist.destroy_process_group()


def cupy() -> dict[str, Any]:
    """Import CuPy and run a kernel of this project on torch's tensors."""
    import torch

    from moeflow.ops import _cupy

    reason = _cupy.unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    import cupy as module

    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    source = """
    extern "C" __global__ void twice(float* x, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) x[i] *= 2.0f;
    }"""
    module.RawKernel(source, "twice", backend="nvrtc")((4,), (256,), (x.data_ptr(), 1000))
    module.cuda.get_current_stream().synchronize()
    assert torch.equal(x.cpu(), 2.0 * torch.arange(1000)), "a kernel is wrong"
    return {"detail": f"CuPy {module.__version__} compiles and runs a kernel on {torch.cuda.get_device_name()}"}


def nvrtc() -> dict[str, Any]:
    """Compile a bf16 kernel for sm_90; neither GPU nor driver is needed."""
    from cupy_backends.cuda.libs import nvrtc as library

    major, minor = library.getVersion()
    folders = [folder for package in ("nvidia.cuda_runtime", "nvidia.cu13") for folder in _include(package)]
    source = (
        "#include <cuda_bf16.h>\n"
        "template <typename T> __global__ void twice(T* x) { x[threadIdx.x] = T(float(x[threadIdx.x]) * 2.0f); }"
    )
    program = library.createProgram(source, "trial.cu", (), ())
    library.addNameExpression(program, "twice<__nv_bfloat16>")
    try:
        library.compileProgram(
            program, ("--gpu-architecture=sm_90", "-std=c++17", *(f"-I{folder}" for folder in folders))
        )
    except Exception as error:
        raise RuntimeError(f"{error}: {library.getProgramLog(program)}") from error
    num_bytes = len(library.getCUBIN(program))
    return {"detail": f"NVRTC {major}.{minor} compiles bf16 for sm_90 ({num_bytes} bytes) without a driver"}


def _include(package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    places = list(spec.submodule_search_locations or []) if spec else []
    return [folder for place in places if (folder := Path(place, "include")).is_dir()]


def deepspeed() -> dict[str, Any]:
    """Import DeepSpeed as it is used on CPU."""
    import deepspeed as module

    return {"detail": f"DeepSpeed {module.__version__} imports (on CPU its first start compiles a small extension)"}


def trackers() -> dict[str, Any]:
    """Write one value through TensorBoard, and start an offline W&B run where it is installed."""
    worked = []
    with tempfile.TemporaryDirectory() as folder:
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(folder)
            writer.add_scalar("trial", 1.0, 0)
            writer.close()
            worked.append("TensorBoard writes")
        if importlib.util.find_spec("wandb"):
            import wandb

            worked.append(f"W&B {wandb.__version__} imports")
    if not worked:
        raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")
    return {"detail": "; ".join(worked)}


def data() -> dict[str, Any]:
    """Look for CIFAR-10 without unpacking or fetching anything."""
    from moeflow.data import archive, cifar10, locate

    places = locate.usual_places()
    for place in places:
        for folder in (place, *(place / layout.folder for layout in cifar10.LAYOUTS)):
            if cifar10.layout_of(folder) is not None:
                return {"detail": f"CIFAR-10 in {folder}", "found": True}
        for known in archive.ARCHIVES:
            if (place / known.name).is_file():
                return {"detail": f"CIFAR-10's archive {place / known.name}, unpacked at first use", "found": True}
    looked = ", ".join(map(str, places))
    return {"detail": f"no CIFAR-10 in {looked}: a run fetches it, or trains on the drawn stand-in", "found": False}


TRIALS = {
    "torch": torch_,
    "layer": layer,
    "config": config,
    "accelerate": accelerate,
    "gloo": gloo,
    "nccl": nccl,
    "cupy": cupy,
    "nvrtc": nvrtc,
    "deepspeed": deepspeed,
    "trackers": trackers,
    "data": data,
}


def main(argv: list[str]) -> int:
    """Run the trial argv[0]; returns the exit code."""
    if argv[:1] == ["_rank"]:
        _rank(argv[1])
        return 0
    if len(argv) != 1 or argv[0] not in TRIALS:
        print(f"usage: python -m moeflow.cli.doctor.trials NAME, one of {', '.join(TRIALS)}", file=sys.stderr)
        return 2
    result = TRIALS[argv[0]]()
    sys.stdout.flush()
    print(MARK + json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
