"""Real starts by other launchers: each rank finds its place, one folder is made, and nothing is spawned."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import LAUNCHER_VARIABLES, free_port
from tests.train.runs import TINY, environment, losses, summary

MOEFLOW = ["-m", "moeflow", "train", "+recipe=cifar_tutorial_moe", *TINY, "trainer.max_steps=3", "parallel.ep=2"]
PYTHON = [sys.executable]
BIN = Path(sys.executable).parent

pytestmark = pytest.mark.distributed


def started(command: list[str], folder: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A launcher that has been started in `folder`, without variables of any other launcher."""
    clean = {name: value for name, value in environment().items() if name not in LAUNCHER_VARIABLES}
    # Scripts of the environment, such as deepspeed, look for their interpreter on the PATH.
    clean |= {"PATH": f"{BIN}{os.pathsep}{clean['PATH']}", **(env or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=clean, start_new_session=True, **pipes)


def check(processes: list[subprocess.Popen[str]], folder: Path, launcher: str, world: int = 2) -> list[float]:
    """Wait for the launchers; one run of `world` ranks has been made, to the end.  Returns its losses."""
    deadline = time.monotonic() + 120
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
    finally:
        for process in processes:
            process.kill()
    said = [re.sub(r"\x1b\[[0-9;]*m", "", text) for text in said]  # mpirun gives its ranks a terminal
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    assert any(f"processes  {world}, started by {launcher}" in text for text in said), "\n".join(said)
    (run_dir,) = (folder / "outputs" / "cifar_tutorial_moe").iterdir()
    assert summary(run_dir)["status"] == "finished"
    assert len(losses(run_dir)) == 3
    return losses(run_dir)


def mpirun(*words: str) -> list[str]:
    """mpirun as root or not, on any number of cores; skips where it is absent."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (Debian, Ubuntu: apt install openmpi-bin)")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", *words]


def test_mpirun(tmp_path: Path):
    check([started([*mpirun("-np", "2"), *PYTHON, *MOEFLOW], tmp_path)], tmp_path, "mpirun")


def slurm_task(rank: int, world: int, per_node: int) -> dict[str, str]:
    """The variables that srun gives to one task."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(world),
        "SLURM_LOCALID": str(rank % per_node),
        "SLURM_NODEID": str(rank // per_node),
        "SLURM_TASKS_PER_NODE": f"{per_node}(x{world // per_node})",
        "SLURM_STEP_NODELIST": "localhost",
    }


def test_tasks_of_srun(tmp_path: Path):
    tasks = [started([*PYTHON, *MOEFLOW], tmp_path, slurm_task(rank, 2, 1)) for rank in range(2)]
    check(tasks, tmp_path, "srun")


@pytest.mark.slow
def test_two_runs_of_mpirun_at_once_do_not_meet(tmp_path: Path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    runs = [started([*mpirun("-np", "2"), *PYTHON, *MOEFLOW], folder) for folder in folders]
    one, two = (check([run], folder, "mpirun") for run, folder in zip(runs, folders, strict=True))
    assert one == two


@pytest.mark.slow
def test_accelerate_launch(tmp_path: Path):
    words = [
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--main_process_port",
        str(free_port()),
    ]
    command = [*PYTHON, "-m", "accelerate.commands.accelerate_cli", *words, "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", *MOEFLOW]
    check([started(command, tmp_path, {"ACCELERATE_USE_CPU": "true"})], tmp_path, "torchrun")


@pytest.mark.slow
def test_deepspeed(tmp_path: Path):
    words = ["--num_nodes", "1", "--num_accelerators", "2", "--master_port", str(free_port()), "--module"]
    command = [str(BIN / "deepspeed"), *words, *MOEFLOW[1:]]
    check([started(command, tmp_path, {"DS_ACCELERATOR": "cpu"})], tmp_path, "deepspeed")


@pytest.mark.slow
def test_torchrun_on_two_nodes(tmp_path: Path):
    port = str(free_port())
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    command = [*PYTHON, "-m", "torch.distributed.run", *words]
    nodes = [started([*command, "--node-rank", str(node), *MOEFLOW], tmp_path) for node in range(2)]
    check(nodes, tmp_path, "torchrun")


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Names of two network namespaces that a bridge joins, 10.77.0.1 and 10.77.0.2, each with an interface e0."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    mark = f"mf{os.getpid() % 100000}"
    hosts, made = [f"{mark}a", f"{mark}b"], []

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        try:
            ip("link", "add", mark, "type", "bridge")
            made.append(("link", "del", mark))
            ip("link", "set", mark, "up")
            for number, host in enumerate(hosts, start=1):
                ip("netns", "add", host)
                made.append(("netns", "del", host))
                ip("link", "add", f"{host}v", "type", "veth", "peer", "name", "e0", "netns", host)
                ip("link", "set", f"{host}v", "master", mark, "up")
                ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", "e0")
                ip("-n", host, "link", "set", "e0", "up")
                ip("-n", host, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine permits no network namespaces: {error.stderr.strip()}")
        yield hosts
    finally:
        for words in reversed(made):
            ip(*words)


@pytest.mark.slow
def test_two_hosts_of_two_ranks(tmp_path: Path, two_hosts: list[str]):
    tasks = []
    for rank in range(4):
        network = {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "e0", "TP_SOCKET_IFNAME": "e0"}
        command = ["ip", "netns", "exec", two_hosts[rank // 2], *PYTHON, *MOEFLOW, "parallel.ep=4"]
        tasks.append(started(command, tmp_path, {**slurm_task(rank, 4, 2), **network}))
    check(tasks, tmp_path, "srun", world=4)
