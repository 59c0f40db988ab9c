"""Scripts under docs/examples run as their pages say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import LAUNCHER_VARIABLES, ROOT, free_port

EXAMPLES = ROOT / "docs" / "examples"


def run(command: list[str], folder: Path, **env: str) -> str:
    """Output of a command that must succeed."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    clean |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fastmoe_tutorial(folder: Path, *words: str) -> list[float]:
    """Losses of the tutorial's epochs, by two workers of mpirun."""
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun here (Debian, Ubuntu: apt install openmpi-bin)")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    script = [sys.executable, str(EXAMPLES / "fastmoe_cifar.py"), *words]
    said = run(["mpirun", *root, "--oversubscribe", "-np", "2", *script], folder, MASTER_PORT=str(free_port()))
    return [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", said)]


@pytest.mark.distributed
def test_fastmoe_tutorial_by_mpirun(tmp_path):
    first, second = fastmoe_tutorial(tmp_path, "--epochs", "2", "--batch", "16", "--steps", "12")
    assert 0 < second < first < 3


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.distributed
def test_fastmoe_tutorial_learns_the_real_images(tmp_path, real_cifar10):
    losses = fastmoe_tutorial(tmp_path, "--data", str(real_cifar10), "--epochs", "2", "--steps", "150")
    assert losses[1] < losses[0] < 2.35


def losses_of(said: str) -> list[float]:
    """Losses that an example printed."""
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]


@pytest.mark.distributed
def test_expert_parallel_takes_the_same_steps_on_any_number_of_processes(tmp_path):
    script = str(EXAMPLES / "expert_parallel.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--master-port"]
    one, two = (
        losses_of(run([*launch, str(free_port()), "--nproc-per-node", world, script], tmp_path)) for world in ("1", "2")
    )
    assert len(one) == 5 and one[-1] < 0.6 * one[0]
    assert two == pytest.approx(one, rel=1e-4)  # a hundred steps, printed to six digits


@pytest.mark.slow
@pytest.mark.distributed
def test_deepspeed_with_experts_on_two_ranks_takes_the_steps_of_one_process(tmp_path):
    pytest.importorskip("deepspeed", reason='DeepSpeed is not installed: pip install "moeflow[deepspeed]"')
    script = str(EXAMPLES / "deepspeed_moe.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--master-port"]
    one, two = (
        losses_of(run([*launch, str(free_port()), "--nproc-per-node", n, script], tmp_path, DS_ACCELERATOR="cpu"))
        for n in ("1", "2")
    )
    assert len(one) == 5 and one[-1] < 0.6 * one[0]
    assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
@pytest.mark.distributed
def test_accelerate(tmp_path):
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "launch",
        "--multi_gpu",
        "--num_processes",
        "2",
    ]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(free_port()), str(EXAMPLES / "accelerate_moe.py")]
    losses = losses_of(run(command, tmp_path, ACCELERATE_USE_CPU="true"))
    assert len(losses) == 3 and losses[-1] < losses[0]
