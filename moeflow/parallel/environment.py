"""What a launcher left in the environment: ranks of torchrun, accelerate, deepspeed, mpirun and srun.

Each is brought to the names that torch.distributed reads (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), so that nothing else has to know which launcher it was.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass

from moeflow.errors import LaunchError

DEFAULT_PORT = 29500
# Variables that are the same in all processes of one start and differ between two: the port is drawn from them, so that
# two runs on one machine do not meet.
_STARTS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "HYDI_CONTROL_FD", "SLURM_JOB_ID")
_NAME = "MOEFLOW_LAUNCHER"  # who it was, once the variables are those of torchrun
_PORTS = range(20000, 30000)  # below those that Linux gives to outgoing connections

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
        launcher: "torchrun" (which stands for accelerate too), "deepspeed", "mpirun", "mpiexec" or "srun".
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
        LaunchError: variables are incomplete, are not numbers, or contradict one another.
    """
    for launcher, names in _VARIABLES.items():
        present = [name for name in names[:2] if name in os.environ]
        if launcher == "srun" and "SLURM_STEP_ID" not in os.environ:
            continue  # inside an allocation (salloc, sbatch) but not started by srun
        if not present or (len(present) == 1 and launcher != "torchrun"):
            continue
        if len(present) == 1:
            absent = names[1] if present[0] == names[0] else names[0]
            raise LaunchError(
                f"{present[0]}={os.environ[present[0]]} is set and {absent} is not: half of what a launcher sets",
                f"unset {present[0]}, or start with a launcher (docs/launching.md)",
            )
        rank, world = _number(names[0]), _number(names[1])
        local_rank = _number(names[2], default=rank)
        local_world = _local_world(names[3], world)
        if not 0 <= rank < world:
            raise LaunchError(
                f"{names[0]}={rank} and {names[1]}={world} contradict one another: ranks go from 0 to {world - 1}",
                "unset both, or start anew with a launcher (docs/launching.md)",
            )
        if world > 1 or launcher == "torchrun":
            if launcher == "torchrun":
                launcher = os.environ.get(_NAME) or ("deepspeed" if "CROSS_RANK" in os.environ else launcher)
            return Launched(launcher, rank, world, local_rank, local_world)
    return None


def export(launched: Launched) -> None:
    """Put the ranks under the names that torch.distributed and Accelerate read.

    Raises:
        LaunchError: nothing tells the address of rank 0.
    """
    os.environ[_NAME] = launched.launcher
    os.environ["RANK"] = str(launched.rank)
    os.environ["WORLD_SIZE"] = str(launched.world)
    os.environ["LOCAL_RANK"] = str(launched.local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(launched.local_world)
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _first_host(launched)
    os.environ.setdefault("MASTER_PORT", str(_port()))


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise LaunchError(f"{name} is not set, though other variables of its launcher are", "start anew")
        return default
    if not re.fullmatch(r"\d+", text):
        raise LaunchError(f"{name}={text!r} is not a number", "unset it, or start anew with a launcher")
    return int(text)


def _local_world(name: str, world: int) -> int:
    """Processes of this machine."""
    if name == "SLURM_TASKS_PER_NODE" and name in os.environ:
        return _slurm_tasks(os.environ[name], int(os.environ.get("SLURM_NODEID", "0")))
    # DeepSpeed's launcher has a name of its own.
    return _number(name if name in os.environ else "LOCAL_SIZE", default=world)


def _slurm_tasks(text: str, node: int) -> int:
    """Tasks of a node by SLURM_TASKS_PER_NODE, which reads like "2(x3),1": three nodes with two, then one with one."""
    for count, repeated in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text):
        node -= int(repeated or 1)
        if node < 0:
            return int(count)
    raise LaunchError(f"SLURM_TASKS_PER_NODE={text!r} does not tell the tasks of this node", "start anew with srun")


def _port() -> int:
    start = [f"{name}={os.environ[name]}" for name in _STARTS if name in os.environ]
    if not start:
        return DEFAULT_PORT
    # Steps of one SLURM job may run side by side.
    start.append(os.environ.get("SLURM_STEP_ID", ""))
    return _PORTS[zlib.crc32(" ".join(start).encode()) % len(_PORTS)]


def _first_host(launched: Launched) -> str:
    if launched.local_world == launched.world:
        return "127.0.0.1"
    if launched.launcher == "srun" and "SLURM_STEP_NODELIST" in os.environ:
        return first_node(os.environ["SLURM_STEP_NODELIST"])
    raise LaunchError(
        f"{launched.launcher} started {launched.world} processes on several machines, and MASTER_ADDR is not set",
        "export MASTER_ADDR=<host of rank 0> (mpirun: add -x MASTER_ADDR -x MASTER_PORT)",
    )


def first_node(nodes: str) -> str:
    """The first host of a SLURM node list, such as node[07-12,15],gpu3 (node07).

    Raises:
        LaunchError: it does not read like one.
    """
    match = re.match(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\]([^,\[\]]*))?(?:,|$)", nodes)
    if match is None:
        raise LaunchError(
            f"SLURM_STEP_NODELIST={nodes!r} is not understood, and MASTER_ADDR is not set",
            "export MASTER_ADDR=<host of rank 0>",
        )
    return "".join(part or "" for part in match.groups())
