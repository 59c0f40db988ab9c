"""Fetching a published archive once per machine, checked, or saying within about two seconds that it cannot be had.

Several processes may ask at once.  A file lock lets one of them fetch while the others wait; the ranks of one launch
also share its failure, so that all of them go on with the same data.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from filelock import FileLock

from moeflow.data import archive, cifar10
from moeflow.data.archive import Archive
from moeflow.errors import ConfigError, DataError
from moeflow.logging import get_logger

log = get_logger(__name__)

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
URL_VARIABLE = "MOEFLOW_CIFAR10_URL"

# Bounds name resolution and connection together: what a machine without a network pays.
CONNECT_TIMEOUT_S = 2.0
# Bounds each wait for more bytes of an answering server.
READ_TIMEOUT_S = 20.0

_CHUNK_BYTES = 1 << 18
_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID")


class DownloadError(DataError):
    """The archive could not be fetched: no network, no such file, a stalled server, or other content."""


def source_url() -> str:
    """Return the address of the archive: $MOEFLOW_CIFAR10_URL (a mirror), or the published one.

    Raises:
        ConfigError: the variable is not an http(s) address.
    """
    url = os.environ.get(URL_VARIABLE) or URL
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number, or an unclosed bracket
        usable = False
    if not usable:
        raise ConfigError(
            f"{URL_VARIABLE}={url} is not an address that starts with http:// or https://",
            f"unset {URL_VARIABLE}, or set it to a mirror of {URL}",
        )
    return url


def archive_of(url: str) -> Archive:
    """Return which published archive lies at an address, by its last part; the Python one when that does not tell."""
    return archive.BINARY if url.rstrip("/").endswith(archive.BINARY.name) else archive.PYTHON


def lock_of(folder: Path) -> FileLock:
    """The lock that one process holds while it downloads or unpacks in `folder`; freed when a process dies."""
    return FileLock(folder / ".moeflow.lock")


def fetch(folder: Path) -> Path:
    """Download and unpack the archive into `folder`, or wait for the process that does.

    Returns:
        The folder with the data files.

    Raises:
        DownloadError: it cannot be had; nothing was left behind.
        DataError: an archive lies there already but is damaged; it is left as it is.
    """
    url = source_url()
    wanted = archive_of(url)
    target = folder / wanted.layout.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock_of(folder):
            if cifar10.layout_of(target) is not None:
                return target
            path = folder / wanted.name
            if not path.exists():
                _fetch_shared(url, wanted, path)
            return archive.unpack(path, wanted)
    except OSError as error:
        raise DownloadError(f"{folder} cannot be written: {error.strerror or error}") from error


def _fetch_shared(url: str, wanted: Archive, path: Path) -> None:
    """Download, unless another rank of this launch has failed to already: then fail in the same way at once."""
    verdict = path.with_name(f".{path.name}.failed")
    launch = _launch_key()
    if launch is not None and (reason := _failure(verdict, launch)) is not None:
        raise DownloadError(reason)
    try:
        download(url, wanted, path)
    except DownloadError as error:
        if launch is not None:
            verdict.write_text(json.dumps({"launch": launch, "reason": error.what}), encoding="utf-8")
        raise
    verdict.unlink(missing_ok=True)


def _launch_key() -> str | None:
    """Name this launch on this machine (all its ranks have one parent), or None for a process started alone."""
    if not any(name in os.environ for name in _LOCAL_RANK_VARIABLES):
        return None
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{socket.gethostname()}:{os.getppid()}:{os.environ.get('MASTER_PORT', '')}:{restart}"


def _failure(verdict: Path, launch: str) -> str | None:
    """Return why another rank of the same launch failed, or None when none has."""
    try:
        stored = json.loads(verdict.read_text(encoding="utf-8"))
        return str(stored["reason"]) if stored["launch"] == launch else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none was written, or by a process that died: try for ourselves


def download(url: str, wanted: Archive, path: Path) -> None:
    """Fetch `url` to `path`, which appears only when the content is right.

    Args:
        url: http or https; proxies are taken from the usual variables.
        wanted: size and checksums that the file must have.
        path: must not exist; one process at a time (see `lock_of`).

    Raises:
        DownloadError: for whatever reason; `path` does not exist then.
    """
    _probe(url)
    part = path.with_name(f".{path.name}.part")
    log.info("downloading %s (%d MB) to %s", url, wanted.num_bytes // 1_000_000, path.parent)
    try:
        _receive(url, wanted, part)
        wrong = archive.mismatch(part, wanted)
        if wrong is not None:
            raise DownloadError(f"what came from {url} is not the published archive: {wrong}")
        os.replace(part, path)
    except urllib.error.HTTPError as error:
        raise DownloadError(f"{url} answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            raise DownloadError(f"{url} stalled: nothing came for {READ_TIMEOUT_S:g} s") from error
        raise DownloadError(f"{url} could not be fetched: {reason or type(error).__name__}") from error
    finally:
        part.unlink(missing_ok=True)


def _receive(url: str, wanted: Archive, part: Path) -> None:
    """Copy the answer to a file, with a line of progress every few seconds."""
    request = urllib.request.Request(url, headers={"User-Agent": "moeflow"})
    # urlopen would keep the proxies that the environment named at its first use.
    opener = urllib.request.build_opener()
    with opener.open(request, timeout=READ_TIMEOUT_S) as answer, open(part, "wb") as out:
        num_bytes, started = 0, time.monotonic()
        told = started
        while chunk := answer.read(_CHUNK_BYTES):
            out.write(chunk)
            num_bytes += len(chunk)
            if num_bytes > wanted.num_bytes:
                return  # the size is wrong already; `mismatch` says so
            now = time.monotonic()
            if now - told >= 5.0:
                told = now
                percent, speed = 100 * num_bytes / wanted.num_bytes, num_bytes / (now - started) / 1e6
                log.info("  %.0f %% of %s, %.1f MB/s", percent, wanted.name, speed)


def _probe(url: str) -> None:
    """Find out within CONNECT_TIMEOUT_S whether the server, or the proxy in front of it, can be reached.

    The look-up of a name has no time limit of its own in the standard library, so it runs on a thread that is left
    behind when time is up.
    """
    host, port = _peer(url)
    failed: list[OSError] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=connect, name="moeflow-probe", daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_S)
    if thread.is_alive():
        raise DownloadError(f"no connection to {host} within {CONNECT_TIMEOUT_S:g} s")
    if failed:
        raise DownloadError(f"no connection to {host}: {failed[0].strerror or failed[0]}") from failed[0]


def _peer(url: str) -> tuple[str, int]:
    """Return the host and port that a request for `url` connects to."""
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        parts = urllib.parse.urlsplit(proxy if "//" in proxy else f"http://{proxy}")
        host = parts.hostname or host
    return host, parts.port or (443 if parts.scheme == "https" else 80)
