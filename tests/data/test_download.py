"""Downloads from a server on this machine: the right file, wrong ones, a stalled one, none at all, and many at once."""

from __future__ import annotations

import http.server
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeflow.data import archive, cifar10, download
from moeflow.errors import ConfigError, DataError
from tests.data.formats import known_archive, pack


class Server:
    """Serves one answer to every request and counts them."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.body, self.status, self.declared, self.delay_s = b"", 200, None, 0.0
        self.stop = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(self.path)
                time.sleep(outer.delay_s)
                self.send_response(outer.status)
                self.send_header("Content-Length", str(outer.declared or len(outer.body)))
                self.end_headers()
                self.wfile.write(outer.body)
                if outer.declared is not None and outer.declared > len(outer.body):
                    outer.stop.wait(outer.stall_s)

            def log_message(self, *_: object) -> None:
                pass

        self.stall_s = 0.0
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/mirror/cifar-10-python.tar.gz"

    def close(self) -> None:
        self.stop.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(small, python_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A mirror with a small archive, which moeflow takes for the published one."""
    path = pack(python_folder, tmp_path / "cifar-10-python.tar.gz")
    monkeypatch.setattr(archive, "PYTHON", known_archive(path))
    monkeypatch.setattr(archive, "ARCHIVES", (archive.PYTHON, archive.BINARY))
    server = Server()
    server.body = path.read_bytes()
    monkeypatch.setenv("MOEFLOW_CIFAR10_URL", server.url)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", *download._LOCAL_RANK_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "new" / "cache"


def left_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} - {".moeflow.lock"}


def test_right_file(server: Server, folder: Path, python_folder: Path):
    target = download.fetch(folder)
    assert target == folder / "cifar-10-batches-py"
    assert cifar10.read(target, train=True)[1].tolist() == cifar10.read(python_folder, train=True)[1].tolist()
    assert left_in(folder) == {"cifar-10-python.tar.gz", "cifar-10-batches-py"}
    assert download.fetch(folder) == target
    assert server.requests == ["/mirror/cifar-10-python.tar.gz"]


def test_an_archive_that_lies_there_is_not_fetched(server: Server, folder: Path):
    folder.mkdir(parents=True)
    (folder / "cifar-10-python.tar.gz").write_bytes(server.body)
    assert download.fetch(folder).is_dir()
    assert server.requests == []


def test_a_damaged_archive_that_lies_there_is_an_error_and_stays(server: Server, folder: Path):
    folder.mkdir(parents=True)
    path = folder / "cifar-10-python.tar.gz"
    path.write_bytes(b"mine")
    with pytest.raises(DataError, match="is not the published archive") as caught:
        download.fetch(folder)
    assert not isinstance(caught.value, download.DownloadError)  # so nothing goes on without data
    assert path.read_bytes() == b"mine"
    assert server.requests == []


def test_wrong_checksum(server: Server, folder: Path):
    server.body = server.body[:-1] + b"?"
    with pytest.raises(download.DownloadError, match=r"what came from .* is not the published archive: its md5 is"):
        download.fetch(folder)
    assert left_in(folder) == set()


@pytest.mark.parametrize("extra", [b"", b"tail"])
def test_another_size(server: Server, folder: Path, extra: bytes):
    server.body = server.body + extra if extra else server.body[:1000]
    with pytest.raises(download.DownloadError, match="bytes, the published file has"):
        download.fetch(folder)
    assert left_in(folder) == set()


def test_connection_that_ends_early(server: Server, folder: Path):
    server.declared, server.body = len(server.body), server.body[:5000]
    with pytest.raises(download.DownloadError, match=r"it has 5,000 bytes|IncompleteRead"):
        download.fetch(folder)
    assert left_in(folder) == set()


@pytest.mark.parametrize("status", [404, 403, 500, 503])
def test_error_status(server: Server, folder: Path, status: int):
    server.status = status
    with pytest.raises(download.DownloadError, match=f"answered {status}"):
        download.fetch(folder)
    assert left_in(folder) == set()


def test_stalled_in_the_middle(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(download, "READ_TIMEOUT_S", 0.5)
    server.declared, server.body, server.stall_s = len(server.body), server.body[:5000], 20.0
    started = time.monotonic()
    with pytest.raises(download.DownloadError, match=r"stalled: nothing came for 0\.5 s"):
        download.fetch(folder)
    assert time.monotonic() - started < 5
    assert left_in(folder) == set()


def test_stalled_before_the_answer(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(download, "READ_TIMEOUT_S", 0.5)
    server.delay_s = 2.0
    with pytest.raises(download.DownloadError, match="stalled"):
        download.fetch(folder)


def test_nobody_listens(folder: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MOEFLOW_CIFAR10_URL", f"http://127.0.0.1:{free.getsockname()[1]}/cifar-10-python.tar.gz")
        started = time.monotonic()
        with pytest.raises(download.DownloadError, match=r"no connection to 127\.0\.0\.1: "):
            download.fetch(folder)
    assert time.monotonic() - started < 1


def test_a_name_look_up_that_hangs_costs_two_seconds(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """What a machine meets whose name server cannot be reached: the look-up has no time limit of its own."""
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(30) and [])
    monkeypatch.setenv("MOEFLOW_CIFAR10_URL", download.URL)
    started = time.monotonic()
    with pytest.raises(download.DownloadError, match=r"no connection to www\.cs\.toronto\.edu within 2 s"):
        download.fetch(folder)
    assert time.monotonic() - started < 3
    release.set()


def test_a_proxy_is_what_must_be_reached(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Behind a proxy the published host cannot be looked up; the proxy fetches it."""
    host, port = server.http.server_address[:2]
    monkeypatch.setenv("http_proxy", f"http://{host}:{port}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("MOEFLOW_CIFAR10_URL", "http://far.invalid/cifar-10-python.tar.gz")
    assert download.fetch(folder).is_dir()
    assert server.requests == ["http://far.invalid/cifar-10-python.tar.gz"]


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://host/x", "cifar-10-python.tar.gz", "http://", "http://h:port/x", "http://[x/"]
)
def test_addresses_that_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, url: str):
    monkeypatch.setenv("MOEFLOW_CIFAR10_URL", url)
    with pytest.raises(ConfigError, match="MOEFLOW_CIFAR10_URL="):
        download.fetch(folder)


def test_the_address_tells_the_layout():
    assert download.archive_of("https://mirror/a/cifar-10-binary.tar.gz") is archive.BINARY
    assert download.archive_of(download.URL) is archive.PYTHON
    assert download.archive_of("https://mirror/cifar10") is archive.PYTHON


def test_a_file_where_the_folder_should_be(server: Server, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(download.DownloadError, match="cannot be written"):
        download.fetch(tmp_path / "file" / "cache")


def _ask(folder: Path, answers) -> None:
    try:
        answers.put(str(download.fetch(folder)))
    except DataError as error:
        answers.put(error.what)


def _ask_at_once(folder: Path, num_processes: int) -> list[str]:
    """Call fetch from several processes, as the ranks of a launch do."""
    context = multiprocessing.get_context("fork")  # they inherit the patched archive
    answers = context.Queue()
    processes = [context.Process(target=_ask, args=(folder, answers)) for _ in range(num_processes)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    return found


def test_many_at_once_download_once(server: Server, folder: Path):
    server.delay_s = 0.3
    assert _ask_at_once(folder, 5) == [str(folder / "cifar-10-batches-py")] * 5
    assert len(server.requests) == 1
    assert left_in(folder) == {"cifar-10-python.tar.gz", "cifar-10-batches-py"}


def test_ranks_of_one_launch_share_a_failure(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Or else some ranks could get the data at the second try, and others none."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    server.status, server.delay_s = 404, 0.2
    answers = _ask_at_once(folder, 4)
    assert len(set(answers)) == 1
    assert "answered 404" in answers[0]
    assert len(server.requests) == 1
    # a rank of the same launch that comes late hears the same, though the server has recovered
    server.status = 200
    assert _ask_at_once(folder, 1) == [answers[0]]
    # the next launch (here: another port) tries anew
    monkeypatch.setenv("MASTER_PORT", "12345")
    assert _ask_at_once(folder, 1) == [str(folder / "cifar-10-batches-py")]
    assert left_in(folder) == {"cifar-10-python.tar.gz", "cifar-10-batches-py"}


def test_a_process_started_alone_tries_every_time(server: Server, folder: Path):
    server.status = 404
    for _ in range(2):
        with pytest.raises(download.DownloadError, match="answered 404"):
            download.fetch(folder)
    assert len(server.requests) == 2


def test_a_killed_download_blocks_nobody(server: Server, folder: Path):
    """The lock of a dead process is free, and its half file is replaced."""
    server.stall_s, server.declared, whole = 30.0, len(server.body), server.body
    server.body = whole[:1000]
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_ask, args=(folder, context.Queue()))
    process.start()
    deadline = time.monotonic() + 20
    while not server.requests and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.kill()
    process.join(timeout=20)
    assert (folder / ".cifar-10-python.tar.gz.part").exists()
    server.body, server.declared = whole, None
    assert download.fetch(folder).is_dir()
    assert left_in(folder) == {"cifar-10-python.tar.gz", "cifar-10-batches-py"}
