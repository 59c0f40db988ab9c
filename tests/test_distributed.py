"""The helpers in `distributed.py` themselves: results, failures and hangs of real processes."""

from __future__ import annotations

import os
import time

import pytest

from tests.distributed import RanksFailed, run_ranks, run_scripts

pytestmark = pytest.mark.distributed


def _sum_of_ranks(start: int):
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total, torch.get_num_threads(), os.environ["WORLD_SIZE"]


def _rank_one_raises():
    import torch
    import torch.distributed as dist

    print(f"rank {dist.get_rank()} is here")
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.all_reduce(torch.ones(1))


def _rank_one_dies():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(17)
    time.sleep(60)


def _rank_one_waits():
    if os.environ["RANK"] == "1":
        time.sleep(60)
    return os.getpid()


def test_ranks_return_in_order():
    results = run_ranks(_sum_of_ranks, 3, 10)
    assert [(rank, float(total), threads, world) for rank, total, threads, world in results] == [
        (0, 33.0, 1, "3"),
        (1, 33.0, 1, "3"),
        (2, 33.0, 1, "3"),
    ]


def test_a_traceback_reaches_the_report():
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 raised.*ValueError: the reason.*rank 1 is here"):
        run_ranks(_rank_one_raises, 2, timeout=30)


def test_a_death_ends_the_others_within_the_grace():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 was ended \(exit code 17\)"):
        run_ranks(_rank_one_dies, 2, timeout=50)
    assert time.monotonic() - start < 30


def test_a_hang_is_ended_and_shows_where():
    with pytest.raises(RanksFailed, match=r"(?s)longer than 4 s.*rank 0 returned.*rank 1 was ended.*_rank_one_waits"):
        run_ranks(_rank_one_waits, 2, timeout=4, init=False)


def test_scripts_get_torchrun_variables_and_are_ended(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys, time\n"
        "print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'EXTRA')), flush=True)\n"
        "if sys.argv[1] == 'exit': sys.exit(int(os.environ['RANK']))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    done = run_scripts([str(script), "exit"], 2, env={"EXTRA": "x"}, check=False, timeout=30)
    assert [rank.code for rank in done] == [0, 1]
    assert [rank.output.split() for rank in done] == [[str(r), "2", "127.0.0.1", "x"] for r in range(2)]

    with pytest.raises(RanksFailed, match=r"longer than 3 s") as failure:
        run_scripts([str(script), "sleep"], 1, env={"EXTRA": "x"}, timeout=3)
    child = int(str(failure.value).split("child ")[1].split()[0])
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{child}/exe") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{child}/exe")
