"""A lost rank ends the others in time, with a message that says who is missing; and a large layout goes through."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import environment, losses, summary

LIMIT_S = 15
GPT = ["+recipe=gpt_moe", "data.source=synthetic", "data.seq_len=16", "launch.device=cpu", "trainer.log_every=1"]


def _ranks(run_dir: Path) -> dict[int, int]:
    """Rank -> process id of the workers of a run."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # not a process, or one that has ended meanwhile
        if b"moeflow.cli.worker" in words and str(run_dir).encode() in words:
            rank = next((v for v in variables if v.startswith(b"RANK=")), None)
            if rank is not None:
                found[int(rank[5:])] = int(folder.name)
    return found


@pytest.mark.distributed
def test_a_killed_rank_ends_the_run_with_a_message_that_names_it(tmp_path: Path):
    run_dir = tmp_path / "run"
    layout = ["launch.processes=4", "parallel.pp=2", "parallel.ep=2", f"launch.timeout_s={LIMIT_S}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "moeflow", "train", *GPT, *layout, f"run.dir={run_dir}", "trainer.max_steps=100000"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (run_dir / "metrics.jsonl").is_file() or len(losses(run_dir)) < 3:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
            time.sleep(0.2)
        ranks = _ranks(run_dir)
        assert sorted(ranks) == [0, 1, 2, 3]
        os.kill(ranks[3], signal.SIGKILL)
        killed = time.monotonic()
        _, said = process.communicate(timeout=2 * LIMIT_S + 20)
        assert time.monotonic() - killed < LIMIT_S + 15  # the limit, and the launcher's patience with the others
    finally:
        process.kill()
        for pid in _ranks(run_dir).values():
            os.kill(pid, signal.SIGKILL)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 3 was killed by SIGKILL" in said
    # Whoever waited for rank 3 says in which collective, over which ranks, who had come and who had not.  Which ranks
    # those are depends on the moment of the kill.
    waited = r"\[rank [12]\] error: [\w -]+ over the \w+ group \(ranks [\d, ]*3\) did not finish; arrived: [\d, ]+;"
    assert re.search(waited + r" did not arrive: [\d, ]*3 \(no sign of life\)", said), said
    assert "Traceback" not in said
    assert not _ranks(run_dir)


@pytest.mark.distributed
@pytest.mark.slow
def test_pp_2_ep_2_tp_2_on_eight_processes_trains_fifty_steps(tmp_path: Path):
    run_dir = tmp_path / "run"
    layout = ["launch.processes=8", "parallel.pp=2", "parallel.ep=2", "parallel.tp=2", "launch.timeout_s=60"]
    words = [*GPT, *layout, "data.batch_size=16", f"run.dir={run_dir}", "trainer.max_steps=50", "trainer.eval_every=0"]
    subprocess.run([sys.executable, "-m", "moeflow", "train", *words], env=environment(), check=True, timeout=300)
    assert summary(run_dir)["status"] == "finished"
    found = losses(run_dir)
    assert len(found) == 50 and found[-1] < found[0]
