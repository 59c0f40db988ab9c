"""The machine: Python, cores, memory, limits, GPUs.  `read_machine` reads them, `check_*` judge the values."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from moeflow.cli.doctor.finding import Finding, size

GROUP = "machine"
LEAST_MEMORY = 2 << 30  # torch, the model and CIFAR-10 as floats, with some room
LEAST_SHM = 256 << 20  # containers often start with 64 MiB
LEAST_DESCRIPTORS = 1024


def read_machine() -> list[Finding]:
    """Read this machine."""
    memory = psutil.virtual_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = Path("/dev/shm")
    return [
        check_python(sys.version_info[:3], sys.executable, sys.prefix != sys.base_prefix),
        Finding(GROUP, "system", "ok", f"{platform.platform(terse=True)}, {platform.machine()}"),
        check_cores(usable_cores(), os.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS")),
        check_memory(memory.total, memory.available),
        check_descriptors(soft, hard),
        check_shm(shutil.disk_usage(shm).total if shm.is_dir() else None),
        check_tool(
            "g++", shutil.which("g++") or shutil.which("c++"), "compiles DeepSpeed's and torch.compile's CPU code"
        ),
        check_tool("mpirun", shutil.which("mpirun"), "starts ranks as FastMoE's tutorial does"),
    ]


def usable_cores() -> int:
    """Cores that this process may run on; a container's CPU quota counts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()[:2]
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores


def check_python(version: tuple[int, ...], executable: str, in_environment: bool) -> Finding:
    """Python 3.10 or newer, in an environment of its own."""
    text = ".".join(map(str, version))
    if version < (3, 10):
        mend = "make clean; make setup PYTHON=/path/to/python3.11"
        return Finding(GROUP, "python", "fault", f"{text} is older than 3.10", mend)
    where = executable if in_environment else f"{executable}, not in a virtual environment"
    return Finding(GROUP, "python", "ok", f"{text} ({where})")


def check_cores(usable: int, all_cores: int, threads: str | None) -> Finding:
    """Cores, and an OMP_NUM_THREADS that does not ask for more."""
    detail = f"{usable}" if usable == all_cores else f"{usable} of {all_cores} may be used"
    if threads is not None and (not threads.isdigit() or int(threads) > usable):
        detail = f"{detail}, but OMP_NUM_THREADS={threads}"
        return Finding(GROUP, "cores", "warn", detail, "unset OMP_NUM_THREADS (moeflow shares the cores out)")
    return Finding(GROUP, "cores", "ok", detail)


def check_memory(total: int, available: int) -> Finding:
    """Enough free memory for a small run."""
    detail = f"{size(available)} free of {size(total)}"
    if available < LEAST_MEMORY:
        mend = f"end other programs; a small run takes about {size(LEAST_MEMORY)}"
        return Finding(GROUP, "memory", "warn", detail, mend)
    return Finding(GROUP, "memory", "ok", detail)


def check_descriptors(soft: int, hard: int) -> Finding:
    """Open files: each rank holds sockets to every other."""
    if soft != resource.RLIM_INFINITY and soft < LEAST_DESCRIPTORS:
        most = LEAST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, 65536)
        detail = f"only {soft} open files for each process"
        return Finding(GROUP, "open files", "warn", detail, f"ulimit -n {most}")
    return Finding(
        GROUP, "open files", "ok", "no limit" if soft == resource.RLIM_INFINITY else f"{soft} for each process"
    )


def check_shm(total: int | None) -> Finding:
    """/dev/shm, through which data workers and NCCL on one machine pass tensors."""
    if total is None:
        return Finding(GROUP, "/dev/shm", "note", "not on this system; data workers use files instead")
    if total < LEAST_SHM:
        detail = f"only {size(total)}: data workers and NCCL may die with a bus error"
        mend = "mount -o remount,size=2G /dev/shm   (in a container: docker run --shm-size=2g)"
        return Finding(GROUP, "/dev/shm", "warn", detail, mend)
    return Finding(GROUP, "/dev/shm", "ok", size(total))


def check_tool(name: str, path: str | None, use: str) -> Finding:
    """A program that some uses need."""
    if path is None:
        package = {"mpirun": "openmpi-bin", "g++": "g++"}[name]
        return Finding(GROUP, name, "note", f"not found; it {use}", f"apt install {package}   (where you need it)")
    return Finding(GROUP, name, "ok", path)


def list_gpus() -> tuple[list[str], str | None]:
    """Return (one line for each NVIDIA GPU, why nvidia-smi failed)."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [], None
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        return [], said[-1] if said else f"exit code {done.returncode}"
    return [line.strip() for line in done.stdout.splitlines() if line.strip()], None


def check_gpus(gpus: list[str], failure: str | None, torch: dict[str, object] | None) -> list[Finding]:
    """GPUs by the driver, against what torch sees of them.

    Args:
        gpus: as `list_gpus` gives them.
        failure: why nvidia-smi failed, if it did.
        torch: what the trial "torch" reported; None when torch does not work.
    """
    if failure is not None:
        mend = "reload the driver (modprobe nvidia), or reinstall it; CPU training does not need it"
        return [Finding(GROUP, "gpu", "warn", f"nvidia-smi fails: {failure}", mend)]
    if not gpus:
        return [Finding(GROUP, "gpu", "note", "none; training runs on CPU")]
    found = [Finding(GROUP, "gpu", "ok", line) for line in gpus]
    if torch is None:
        return found
    if torch["cuda"] is None:
        detail = f"torch {torch['version']} is a CPU build, so it cannot use the GPU"
        found.append(
            Finding(GROUP, "gpu", "warn", detail, "pip install --force-reinstall torch   (PyPI's Linux build)")
        )
    elif not torch["devices"]:
        detail = f"torch is built for CUDA {torch['cuda']} but sees no GPU: an older driver, or CUDA_VISIBLE_DEVICES"
        mend = "unset CUDA_VISIBLE_DEVICES; else update the driver, or install the torch build of its CUDA version"
        found.append(Finding(GROUP, "gpu", "warn", detail, mend))
    return found
