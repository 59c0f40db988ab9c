"""What a launcher left in the environment: ranks of torchrun, accelerate, deepspeed, mpirun and srun.

Each is brought to the names that torch.distributed reads (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), so that nothing else has to know which launcher it was.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass

from moeflow.errors import LaunchError

DEFAULT_PORT = "29500"

# launcher -> where it puts rank, world size, local rank, local world size
_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
}


@dataclass(frozen=True)
class Launched:
    """How this process was started, when a launcher started it.

    Attributes:
        launcher: "torchrun" (which stands for accelerate and deepspeed too), "mpirun", "mpiexec" or "srun".
        rank: of this process.
        world: processes in all.
        local_rank: of this process on its machine.
        local_world: processes on this machine.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int
    local_world: int


def detect() -> Launched | None:
    """Read the launcher's variables; None when this process was started by hand.

    Raises:
        LaunchError: variables are incomplete or are not numbers.
    """
    for launcher, names in _VARIABLES.items():
        if names[0] not in os.environ or names[1] not in os.environ:
            continue
        if launcher == "srun" and "SLURM_STEP_ID" not in os.environ:
            continue  # inside an allocation (salloc, sbatch) but not started by srun
        rank, world = _number(names[0]), _number(names[1])
        local_rank = _number(names[2], default=rank)
        local_world = _number(names[3], default=world)
        if world > 1 or launcher == "torchrun":
            return Launched(launcher, rank, world, local_rank, local_world)
    return None


def export(launched: Launched) -> None:
    """Put the ranks under the names that torch.distributed and Accelerate read.

    Raises:
        LaunchError: nothing tells the address of rank 0.
    """
    os.environ["RANK"] = str(launched.rank)
    os.environ["WORLD_SIZE"] = str(launched.world)
    os.environ["LOCAL_RANK"] = str(launched.local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(launched.local_world)
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _first_host(launched)
    os.environ.setdefault("MASTER_PORT", DEFAULT_PORT)


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise LaunchError(f"{name} is not set, though other variables of its launcher are", "start anew")
        return default
    # SLURM_TASKS_PER_NODE reads like "2(x3)" or "4,2"; this node's share is the first for homogeneous jobs.
    match = re.match(r"\d+", text)
    if match is None:
        raise LaunchError(f"{name}={text!r} is not a number", "unset it, or start anew with a launcher")
    return int(match.group())


def _first_host(launched: Launched) -> str:
    if launched.launcher == "srun" and "SLURM_STEP_NODELIST" in os.environ:
        nodes = os.environ["SLURM_STEP_NODELIST"]
        try:
            listed = subprocess.run(
                ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=20
            )
            return listed.stdout.split()[0]
        except (OSError, subprocess.SubprocessError, IndexError) as error:
            raise LaunchError(
                f"MASTER_ADDR is not set, and scontrol does not tell the hosts of {nodes}: {error}",
                "export MASTER_ADDR=<host of rank 0>",
            ) from error
    if launched.local_world == launched.world:
        return "127.0.0.1"
    raise LaunchError(
        f"{launched.launcher} started {launched.world} processes on several machines, and MASTER_ADDR is not set",
        "export MASTER_ADDR=<host of rank 0> (mpirun: add -x MASTER_ADDR -x MASTER_PORT)",
    )
