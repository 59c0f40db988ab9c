"""Real processes over gloo, for tests: each rank its own process, a time limit, few threads, and readable failures.

Two ways to start them:

* `run_ranks(function, world, *args)` calls one picklable function on every rank and returns what they returned.  The
  ranks are forked from a server that has imported torch already, so a group of two stands in a fraction of a second.
* `run_scripts(argv, world)` starts a program once for each rank, with the variables that torchrun would set.

Whatever happens, no process outlives the call, and a failure shows the traceback or output of each rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 5.0  # after one rank failed, the others may fail as well, and tell more
LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "NODE_RANK",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
)  # fmt: skip


class RanksFailed(AssertionError):
    """At least one rank raised, died or ran out of time; the message holds what each of them said."""


@dataclass(frozen=True)
class Finished:
    """What one rank of `run_scripts` left: its exit code, and stdout and stderr together."""

    code: int
    output: str


def free_port() -> int:
    """A TCP port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for one rank of one machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    threads: int = 1,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call `function(*args)` on `world` ranks and return their results in order of rank.

    Args:
        function: a function at module level (it is pickled by name); so are arguments and results.
        world: processes.
        timeout: seconds for the whole call, and for each collective.
        init: make the default gloo group first and destroy it afterwards.  Without it the ranks only get torchrun's
            variables, with a free MASTER_PORT.
        threads: CPU threads of each rank.
        env: further environment variables of every rank.

    Raises:
        RanksFailed: with each rank's traceback.
    """
    context = multiprocessing.get_context("forkserver")
    # DTensor imports torch._dynamo at its first use: seconds in every rank, unless the server has it.
    context.set_forkserver_preload(["pytest", "torch.distributed", "torch.distributed.tensor", "torch._dynamo"])
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        processes = [
            context.Process(
                target=_rank_main,
                args=(folder, rank, world, function, args, timeout, init, threads, {**(env or {}), "_PORT": str(port)}),
                daemon=False,
            )
            for rank in range(world)
        ]
        try:
            for process in processes:
                process.start()
            late = _wait(processes, timeout)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        outcomes = [_outcome(folder, rank) for rank in range(world)]
        if late or any(kind != "result" for kind, _ in outcomes):
            raise RanksFailed(_explain(function.__qualname__, timeout, processes, outcomes, folder, late))
        return [value for _, value in outcomes]


def run_scripts(
    argv: Sequence[str],
    world: int,
    *,
    timeout: float = 60.0,
    threads: int = 1,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
) -> list[Finished]:
    """Start `python *argv` once for each rank, as torchrun would, and wait for all.

    Args:
        argv: what follows the interpreter, for instance ["-m", "moeflow", "train", ...] or [script, argument].
        world: processes.
        timeout: seconds for the whole call; then every rank is killed and the call fails.
        threads: OMP_NUM_THREADS of each rank.
        env: further environment variables of every rank.
        cwd: folder to run in.
        check: fail unless every rank exits with 0.

    Raises:
        RanksFailed: with each rank's output.
    """
    port = free_port()
    base = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    base |= {"OMP_NUM_THREADS": str(threads), **(env or {})}
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        logs = [Path(name, f"rank{rank}.log") for rank in range(world)]
        processes: list[subprocess.Popen[bytes]] = []
        late = False
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as out:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, *argv],
                            env={**base, **rank_environment(rank, world, port)},
                            cwd=cwd,
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,  # so that children of a rank end with it
                        )
                    )
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                if time.monotonic() > deadline:
                    late = all(not process.poll() for process in processes)
                    break
                time.sleep(0.02)
        finally:
            for process in processes:
                _kill_session(process)
        done = [Finished(process.returncode, log.read_text(errors="replace")) for process, log in zip(processes, logs)]
    if late or (check and any(rank.code != 0 for rank in done)):
        title = f"{' '.join(argv)} " + (f"took longer than {timeout:g} s" if late else "failed")
        said = [f"--- rank {rank}, exit {one.code} ---\n{one.output}" for rank, one in enumerate(done)]
        raise RanksFailed("\n".join([title, *said]))
    return done


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it may have ended already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(processes: list[Any], timeout: float) -> bool:
    """Wait for all, or for `GRACE_S` after the first failure; True when time ran out and none had failed."""
    deadline = time.monotonic() + timeout
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            return all(not process.exitcode for process in processes)
        for sentinel in wait(list(waiting), timeout=left):
            process = waiting.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return False


def _rank_main(folder, rank, world, function, args, timeout, init, threads, env) -> None:
    """Body of one rank of `run_ranks`: leaves rank<N>.result or rank<N>.error, and rank<N>.log."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(rank_environment(rank, world, int(env.pop("_PORT"))) | env)
    faulthandler.dump_traceback_later(max(timeout - 1.0, 0.5 * timeout), exit=False, file=sys.stderr)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        if init:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder / 'store'}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout),
            )
        value = function(*args)
        if init:
            dist.barrier()  # no rank takes its sockets away while another still talks to it
            dist.destroy_process_group()
        _leave(folder / f"rank{rank}.result", pickle.dumps(value))
    except BaseException as error:
        _leave(folder / f"rank{rank}.error", pickle.dumps(traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: atexit handlers and destructors of a broken group may wait for ranks that are gone.
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code else 1)


def _leave(path: Path, content: bytes) -> None:
    aside = path.with_suffix(".part")
    aside.write_bytes(content)
    aside.rename(path)


def _outcome(folder: Path, rank: int) -> tuple[str, Any]:
    for kind in ("error", "result"):
        path = folder / f"rank{rank}.{kind}"
        if path.exists():
            return kind, pickle.loads(path.read_bytes())
    return "nothing", None


def _explain(name, timeout, processes, outcomes, folder, late) -> str:
    parts = [f"{name} on {len(processes)} ranks " + (f"took longer than {timeout:g} s" if late else "failed")]
    for rank, (process, (kind, value)) in enumerate(zip(processes, outcomes)):
        log = folder / f"rank{rank}.log"
        said = log.read_text(errors="replace").strip() if log.exists() else ""
        state = {"result": "returned", "error": "raised", "nothing": f"was ended (exit code {process.exitcode})"}[kind]
        parts.append(f"--- rank {rank} {state} ---")
        if kind == "error":
            parts.append(value.rstrip())
        if said and kind != "result":
            parts.append(f"[output of rank {rank}]\n{said[-4000:]}")
    return "\n".join(parts)
