"""Launchers are recognized by their variables; what does not fit is a clear message.

The sets are written by hand after the launchers' documentation.  tests/train/test_launchers.py starts mpirun, torchrun,
accelerate and deepspeed for real; srun and MPICH's or Intel's mpiexec are known from these variables alone.
"""

from __future__ import annotations

import os

import pytest

from moeflow.errors import LaunchError
from moeflow.parallel import environment
from moeflow.parallel.environment import Launched, detect, export, first_node

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400", "CROSS_RANK": "1", "CROSS_SIZE": "2",
}  # fmt: skip
OPENMPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_ess_base_jobid": "3517054977", "PMIX_NAMESPACE": "3517054977",
    "PMIX_RANK": "1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "gpu[07-09,12]",
}  # fmt: skip


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch):
    """Sets these variables and none of a launcher's else; what `export` adds is taken back."""
    known = {"MOEFLOW_LAUNCHER", *TORCHRUN, *DEEPSPEED, *OPENMPI_4, *HYDRA, *SRUN}

    def put(values: dict[str, str]) -> None:
        for name in known:
            monkeypatch.setenv(name, "")  # so that the state before is restored, whatever is set meanwhile
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("values", "expected", "address"),
    [
        (TORCHRUN, Launched("torchrun", 3, 4, 1, 2), "10.0.0.1"),
        (DEEPSPEED, Launched("deepspeed", 3, 4, 1, 2), "10.0.0.1"),
        (OPENMPI_4, Launched("mpirun", 1, 2, 1, 2), "127.0.0.1"),
        (HYDRA, Launched("mpiexec", 1, 2, 1, 2), "127.0.0.1"),
        (SRUN, Launched("srun", 5, 7, 1, 2), "gpu07"),
        (
            {**SRUN, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"},
            Launched("srun", 6, 7, 0, 1),
            "gpu07",
        ),
        ({**SRUN, "MASTER_ADDR": "head"}, Launched("srun", 5, 7, 1, 2), "head"),
    ],
)
def test_recognized_and_brought_to_one_set_of_names(values, expected, address, variables):
    variables(values)
    assert detect() == expected
    export(expected)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [int(os.environ[name]) for name in names] == [
        expected.rank, expected.world, expected.local_rank, expected.local_world,
    ]  # fmt: skip
    assert os.environ["MASTER_ADDR"] == address
    assert os.environ["MASTER_PORT"] == values.get("MASTER_PORT", os.environ["MASTER_PORT"])
    assert detect() == Launched(
        detect().launcher, expected.rank, expected.world, expected.local_rank, expected.local_world
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"},  # inside sbatch, without srun
        {**OPENMPI_4, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},  # mpirun -np 1
    ],
)
def test_started_by_hand(values, variables):
    variables(values)
    assert detect() is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "1"}, r"RANK=1 is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE=2 is set and RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK=2 and WORLD_SIZE=2 contradict"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, r"RANK='one' is not a number"),
        ({"RANK": "", "WORLD_SIZE": "2"}, r"RANK='' is not a number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, r"RANK='-1' is not a number"),
        ({**SRUN, "SLURM_TASKS_PER_NODE": "many"}, r"SLURM_TASKS_PER_NODE='many'"),
        ({**SRUN, "SLURM_NODEID": "9"}, r"does not tell the tasks of this node"),
    ],
)
def test_what_does_not_fit_is_said(values, message, variables):
    variables(values)
    with pytest.raises(LaunchError, match=message):
        detect()


def test_several_machines_need_an_address(variables):
    variables({**OPENMPI_4, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    with pytest.raises(LaunchError, match="started 2 processes on several machines, and MASTER_ADDR is not set"):
        export(detect())


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node3", "node3"),
        ("node[07-12,15],gpu3", "node07"),
        ("gpu3,node[1-2]", "gpu3"),
        ("rack1-[010-020]-ib", "rack1-010-ib"),
        ("c[5]", "c5"),
        ("10.0.0.4,10.0.0.5", "10.0.0.4"),
    ],
)
def test_first_of_a_node_list(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", "[1-2]", "a[b]", ","])
def test_a_node_list_that_is_none(nodes):
    with pytest.raises(LaunchError, match="export MASTER_ADDR"):
        first_node(nodes)


def test_two_starts_on_one_machine_take_different_ports(variables):
    ports = set()
    for job in ("3517054977", "3517054978", "3517054979"):
        variables({**OPENMPI_4, "PMIX_NAMESPACE": job})
        ports.add(environment._port())
    assert len(ports) == 3 and all(20000 <= port < 30000 for port in ports)
    variables({})
    assert environment._port() == environment.DEFAULT_PORT
