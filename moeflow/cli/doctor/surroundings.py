"""What surrounds a run: its folder, names and interfaces of the network, variables that launchers leave behind."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from moeflow.cli.doctor.finding import Finding, size
from moeflow.schema import RunSection

GROUP = "surroundings"
LEAST_DISK = 1 << 30
LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
)  # fmt: skip


def read_surroundings() -> list[Finding]:
    """Look around."""
    interfaces = psutil.net_if_addrs()
    return [
        *check_outputs(Path(RunSection().root)),
        check_hostname(socket.gethostname(), resolve(socket.gethostname())),
        check_interface(os.environ.get("GLOO_SOCKET_IFNAME"), interfaces),
        check_launcher_variables(os.environ),
        about_accelerate(),
    ]


def check_outputs(root: Path) -> list[Finding]:
    """Whether run folders can be made under `root`; leaves nothing behind and does not make `root` itself."""
    base = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    elsewhere = "moeflow train ... run.root=/path/with/room"
    try:
        with tempfile.TemporaryDirectory(prefix=".moeflow-doctor-", dir=base) as name:
            Path(name, "trial").write_bytes(b"trial")
        free = shutil.disk_usage(base).free
    except OSError as error:
        detail = f"{root} cannot be written to in {base}: {error.strerror or error}"
        return [Finding(GROUP, "run folder", "fault", detail, elsewhere)]
    written = Finding(GROUP, "run folder", "ok", f"{root.absolute()} can be written to")
    return [written, check_disk(free)]


def check_disk(free: int) -> Finding:
    """Room for checkpoints where runs are kept."""
    if free < LEAST_DISK:
        mend = "remove old run folders, or moeflow train ... run.root=/path/with/room checkpoint.keep_last=1"
        return Finding(GROUP, "disk", "warn", f"only {size(free)} free for checkpoints", mend)
    return Finding(GROUP, "disk", "ok", f"{size(free)} free")


def resolve(name: str) -> str | None:
    """Address of a host name, or None."""
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def check_hostname(name: str, address: str | None) -> Finding:
    """Gloo binds to the address that the machine's own name resolves to."""
    if address is None:
        detail = f"'{name}' does not resolve: ranks on several machines will not find each other"
        mend = f'echo "127.0.1.1 {name}" >> /etc/hosts   (or: export GLOO_SOCKET_IFNAME=INTERFACE between machines)'
        return Finding(GROUP, "host name", "warn", detail, mend)
    if address.startswith("127."):
        detail = f"'{name}' is {address}: fine on one machine; for several, export GLOO_SOCKET_IFNAME=INTERFACE"
        return Finding(GROUP, "host name", "note", detail)
    return Finding(GROUP, "host name", "ok", f"'{name}' is {address}")


def check_interface(wanted: str | None, interfaces: Collection[str]) -> Finding:
    """GLOO_SOCKET_IFNAME names interfaces that exist."""
    names = ", ".join(sorted(interfaces))
    if wanted is None:
        return Finding(GROUP, "interfaces", "ok", f"{names} (GLOO_SOCKET_IFNAME is not set)")
    missing = [name for name in wanted.split(",") if name not in interfaces]
    if missing:
        detail = f"GLOO_SOCKET_IFNAME={wanted}, but there is no interface {', '.join(missing)}; there are {names}"
        return Finding(GROUP, "interfaces", "fault", detail, "unset GLOO_SOCKET_IFNAME")
    return Finding(GROUP, "interfaces", "ok", f"GLOO_SOCKET_IFNAME={wanted}")


def check_launcher_variables(environ: Mapping[str, str]) -> Finding:
    """Variables of a launcher in a plain shell make a run wait for ranks that nobody started."""
    left = [name for name in LAUNCHER_VARIABLES if name in environ]
    if {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"} & set(left):
        detail = (
            f"{', '.join(left)} set: a run would take this shell for one rank of a launcher, and wait for the others"
        )
        return Finding(GROUP, "launcher", "warn", detail, f"unset {' '.join(left)}")
    return Finding(GROUP, "launcher", "ok", "no launcher's variables; moeflow starts the ranks itself")


def about_accelerate() -> Finding:
    """What `accelerate launch --cpu` gets wrong."""
    detail = "`accelerate launch --cpu --num_processes N` starts one process, not N, and says nothing"
    mend = "moeflow train ... launch.processes=N   (or: torchrun --nproc-per-node N -m moeflow train ...)"
    return Finding(GROUP, "accelerate", "note", detail, mend)
