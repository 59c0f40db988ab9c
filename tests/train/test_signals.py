from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from moeflow.train.signals import StopSignal
from tests.distributed import LAUNCHER_VARIABLES, ROOT

pytestmark = pytest.mark.timeout(60)


def child(body: str, **environment: str) -> subprocess.Popen:
    """A Python process that runs `body`; it has said "ready" when this returns."""
    clean = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)],
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


LOOP = """
    import sys, time
    from moeflow import logging
    from moeflow.train.signals import StopSignal
    logging.setup(0)
    with StopSignal("moeflow resume outputs/x", grace_s=GRACE) as stop:
        print("ready", flush=True)
        steps = 0
        while not stop.stop_requested() and steps < 3000:
            time.sleep(0.01)
            steps += 1
        time.sleep(SAVING)
        print("saved", stop.signum, flush=True)
"""


def loop(grace: float, saving: float, **environment: str) -> subprocess.Popen:
    return child(LOOP.replace("GRACE", str(grace)).replace("SAVING", str(saving)), **environment)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_the_run_save_and_says_how_to_go_on(number):
    process = loop(grace=0.3, saving=0.2)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, f"saved {int(number)}\n")
    assert err.count(number.name) == 1
    assert "saving after this step" in err
    assert "moeflow resume outputs/x" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once(number):
    process = loop(grace=0.1, saving=50)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    before = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - before < 5
    assert (process.returncode, out) == (128 + number, "")
    assert "ending at once" in err


def test_a_signal_that_a_launcher_forwards_as_well_counts_once():
    process = loop(grace=5.0, saving=0.7)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.1)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "saved 2\n")


BLOCKED = """
    import os, signal
    from moeflow import logging
    from moeflow.errors import stopped_code
    from moeflow.train.signals import StopSignal
    logging.setup(0)
    with StopSignal("moeflow resume outputs/x", begun=False, grace_s=20) as stop:
        print("ready", flush=True)
        try:
            open(PATH)  # a pipe that nobody writes to: a file system that hangs
        except KeyboardInterrupt as stopped:
            print("out", stopped_code(stopped), flush=True)
        stop.begin()
        os.kill(os.getpid(), signal.SIGTERM)
        print("asked", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_first_step_a_signal_ends_what_hangs(number, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    process = child(BLOCKED.replace("PATH", repr(str(tmp_path / "pipe"))))
    time.sleep(0.2)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, f"out {128 + number}\nasked\n")
    assert f"{number.name} before the first step: stopping" in err


def test_other_ranks_keep_quiet():
    process = loop(grace=0.3, saving=0.0, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "saved 15\n", "")


def test_grace_is_longer_under_a_launcher(monkeypatch):
    alone = StopSignal()._grace_s
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert StopSignal()._grace_s > alone


def test_the_second_signal_ends_a_rank_that_waits_in_a_collective():
    """Rank 0 waits in C++ for a peer that never comes; Python's own handlers cannot run then."""
    process = child(
        """
        import ctypes, threading
        from moeflow.train.signals import StopSignal
        with StopSignal(grace_s=0.1) as stop:
            lock = ctypes.CDLL(None)
            mutex = ctypes.create_string_buffer(128)  # a zeroed pthread mutex, locked twice: waits for ever, in C
            lock.pthread_mutex_lock(mutex)
            print("ready", flush=True)
            lock.pthread_mutex_lock(mutex)
        """
    )
    process.send_signal(signal.SIGINT)
    time.sleep(0.6)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT


def test_a_signal_to_a_forked_worker_is_none_to_the_trainer():
    process = child(
        """
        import os, signal, time
        from moeflow.train.signals import StopSignal
        with StopSignal(grace_s=0.1) as stop:
            worker = os.fork()
            if worker == 0:
                time.sleep(30)
                os._exit(0)
            time.sleep(0.2)
            print("ready", flush=True)
            os.kill(worker, signal.SIGTERM)
            status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
            time.sleep(0.2)
            print(status, stop.stop_requested())
        """
    )
    out, err = process.communicate(timeout=20)
    assert (out, process.returncode) == ("-15 False\n", 0), err


def test_previous_handlers_and_wakeup_pipe_come_back():
    heard, (read, write) = [], os.pipe()
    os.set_blocking(write, False)
    before = {number: signal.signal(number, lambda n, _: heard.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    pipe_before = signal.set_wakeup_fd(write)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with StopSignal() as stop:
                assert signal.getsignal(signal.SIGTERM) is not mine
                os.kill(os.getpid(), signal.SIGTERM)
                deadline = time.monotonic() + 5
                while not stop.stop_requested() and time.monotonic() < deadline:
                    time.sleep(0.001)
                assert stop.signum == signal.SIGTERM
        assert heard == []
        assert signal.getsignal(signal.SIGTERM) is mine
        os.kill(os.getpid(), signal.SIGINT)
        assert heard == [signal.SIGINT]
        assert os.read(read, 1) == bytes([signal.SIGINT])
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)
    finally:
        signal.set_wakeup_fd(pipe_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read), os.close(write)


def test_outside_of_the_main_thread_it_warns_and_listens_to_nothing(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("moeflow"), "propagate", True)
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with StopSignal() as stop:
            seen.append((stop.stop_requested(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
    assert "outside of the main thread" in caplog.text


@pytest.mark.distributed
def test_torchrun_that_gets_a_signal_lets_its_ranks_save(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, time
            from moeflow.train.signals import StopSignal
            with StopSignal() as stop:
                open("{tmp_path}/ready" + os.environ["RANK"], "w").close()
                while not stop.stop_requested():
                    time.sleep(0.01)
                time.sleep(1.0)
                open("{tmp_path}/saved" + os.environ["RANK"], "w").close()
            """
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 40
    while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everything in the foreground group
    process.wait(timeout=20)
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]
