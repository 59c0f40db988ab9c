"""Starting the processes of a run.

One process runs in the caller's own.  Several are started through Accelerate's launcher (torchrun inside).  On CPUs its
`--cpu` switch would start a single process whatever --num_processes says, so the distributed launcher is asked for by
name and the ranks are told through ACCELERATE_USE_CPU to stay on the CPU.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence

from moeflow.errors import LaunchError
from moeflow.logging import get_logger
from moeflow.parallel.environment import Launched
from moeflow.parallel.rendezvous import agree
from moeflow.schema import RunConfig

WORKER = "moeflow.cli.worker"
#: Set in ranks that moeflow started itself; they see torchrun's variables too.
OWN_START = "MOEFLOW_STARTED_RANKS"


def launch(config: RunConfig, run_dir: str, resume: bool = False) -> int:
    """Run training from a process that was started by hand: here, or in `launch.processes` new ones.

    Args:
        config: the frozen configuration of the run folder.
        run_dir: of the run; its config.yaml is what the ranks read.
        resume: go on from the latest checkpoint.

    Returns:
        Exit code: 0 finished, 128 + signal interrupted (and saved).

    Raises:
        MoeflowError: the run cannot start or go on (with several ranks, they print it themselves).
    """
    check_processes(config)
    if config.launch.processes > 1:
        return start_ranks(config, [run_dir, *(["--resume"] if resume else [])])
    return work(config, run_dir, resume)


def run_from_launcher(
    launched: Launched, decide: Callable[[], str], load: Callable[[str], RunConfig], resume: bool = False
) -> int:
    """Run training in a process that a launcher started: nothing is spawned.

    Args:
        launched: what the launcher left in the environment.
        decide: composes, makes the run folder and returns its path; called on rank 0 alone.
        load: reads the frozen configuration of a run folder.
        resume: go on from the latest checkpoint.
    """
    run_dir = agree(launched, decide)
    return work(load(run_dir), run_dir, resume)


def work(config: RunConfig, run_dir: str, resume: bool) -> int:
    """Train in this process, as one rank; returns the exit code."""
    from moeflow.train.job import train

    return train(config, run_dir, resume)["exit_code"]


def start_ranks(config: RunConfig, arguments: Sequence[str]) -> int:
    """Start `launch.processes` ranks of the worker on this machine and wait for them.

    Args:
        config: of the run.
        arguments: of the worker module.

    Returns:
        0 when every rank ended well, else the exit code of the rank that failed first (128 + signal when killed).
    """
    from accelerate.commands.launch import launch_command_parser, multi_gpu_launcher
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser = launch_command_parser()
    args = parser.parse_args(
        [
            *("--multi_gpu", "--num_machines", "1", "--machine_rank", "0"),
            *("--num_processes", str(config.launch.processes)),
            *("--main_process_port", str(config.launch.port or _free_port())),
            *("--num_cpu_threads_per_process", _threads(config)),
            *("--mixed_precision", "no", "--dynamo_backend", "no", "--module", WORKER),
            *arguments,
        ]
    )
    _quiet()
    if config.launch.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ[OWN_START] = "1"
    try:
        multi_gpu_launcher(args)
    except ChildFailedError as failure:
        rank, first = failure.get_first_failure()
        if first.exitcode < 0:
            # A killed rank cannot tell by itself; the others only see that it is gone.
            killer = signal.Signals(-first.exitcode).name
            get_logger(__name__).error("rank %d was killed by %s, and the other ranks ended with it", rank, killer)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    finally:
        os.environ.pop(OWN_START, None)
    return 0


def _quiet() -> None:
    """Keep torchrun from telling of a failed rank or a signal in its own words, after moeflow's."""
    import torch.distributed.run  # noqa: F401  (its modules each set the level of their own logger)

    for name in ["torch.distributed.elastic", "torch.distributed.run", *logging.root.manager.loggerDict]:
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _threads(config: RunConfig) -> str:
    """OMP_NUM_THREADS of each rank: without one, torchrun sets 1 and says so at length."""
    shared_out = max(1, len(os.sched_getaffinity(0)) // config.launch.processes)
    return str(config.launch.threads or os.environ.get("OMP_NUM_THREADS") or shared_out)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_processes(config: RunConfig) -> None:
    """Refuse more CUDA processes than there are devices.

    Raises:
        LaunchError: there are fewer devices than processes.
    """
    import torch

    if config.launch.device == "cpu" or not torch.cuda.is_available():
        return
    if config.launch.processes > torch.cuda.device_count():
        raise LaunchError(
            f"launch.processes={config.launch.processes}: this machine has {torch.cuda.device_count()} CUDA devices",
            f"launch.processes={torch.cuda.device_count()}, or launch.device=cpu",
        )
