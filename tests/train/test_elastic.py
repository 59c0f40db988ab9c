"""torchrun starts the ranks anew when one of them dies: with resume=auto the run goes on as if nothing had happened."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.distributed import free_port
from tests.train.runs import TINY, environment, rows, summary, train
from tests.train.test_runs import saved_tensors

WORDS = ["parallel.ep=2", "trainer.max_steps=60", "checkpoint.every=2", "trainer.eval_every=0"]


def latest(folder):
    return max((int(path.name[5:13]) for path in (folder / "checkpoints").glob("step_????????")), default=0)


def wait(condition, process, log):
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def kill_one(process):
    ranks = [child for child in psutil.Process(process.pid).children() if child.environ().get("RANK") == "1"]
    assert len(ranks) == 1
    ranks[0].kill()
    ranks[0].wait(30)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_ranks_that_come_back_go_on(tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    words = ["train", "+recipe=cifar_tutorial_moe", *TINY, *WORDS, f"run.dir={folder}", "resume=auto"]
    launcher = ["--nproc-per-node", "2", "--max-restarts", "2", "--master-port", str(free_port())]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "moeflow", *words],
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        # Before the first checkpoint, and later.
        wait(lambda: (folder / "config.yaml").is_file(), process, log)
        kill_one(process)
        wait(lambda: latest(folder) >= 8, process, log)
        kill_one(process)
        assert process.wait(200) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    assert "resumed" in log.read_text()
    train(tmp_path / "unbroken", *WORDS, "launch.processes=2")
    assert summary(folder)["status"] == "finished"
    assert rows(folder) == rows(tmp_path / "unbroken")
    one, other = saved_tensors(folder, 60), saved_tensors(tmp_path / "unbroken", 60)
    assert all(value.equal(other[key]) for key, value in one.items())
