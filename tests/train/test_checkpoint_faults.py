"""Checkpoints whose writer is killed, whose disk is full or read-only, or that are written in the background."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from moeflow.errors import CheckpointError
from moeflow.train.checkpoint import CheckpointStore
from moeflow.train.shelf import Shelf
from tests.distributed import run_ranks
from tests.train.forked import start
from tests.train.small_store import lay_out, save_small, small, store_of_rank, value_of

# --- crashes ---------------------------------------------------------------------------------------------------------


def save_forever(folder: str, first: int, connection) -> None:
    store = CheckpointStore(folder)
    connection.send("ready")
    for step in range(first, first + 100_000):
        save_small(store, step)
        connection.send(step)
        store.prune(keep_last=2, keep_best=0)


def last_word(connection) -> int | None:
    """The last step that the killed process reported as saved."""
    step = None
    try:
        while connection.poll(0):
            step = connection.recv()
    except (EOFError, OSError):
        pass
    return step


def test_thirty_kills_lose_no_completed_step(tmp_path):
    draw = random.Random(5)
    completed, reader = 0, CheckpointStore(tmp_path)
    for _ in range(30):
        ours, theirs = multiprocessing.Pipe()
        process = start(save_forever, str(tmp_path), completed + 1, theirs)
        theirs.close()
        assert ours.recv() == "ready"
        for _ in range(draw.randrange(3)):
            completed = ours.recv()
        time.sleep(draw.uniform(0.0, 0.08))  # a save takes about 0.05
        process.kill()
        process.join()
        completed = max(completed, last_word(ours) or 0)
        latest = reader.latest()
        if completed:
            assert latest is not None and completed <= latest <= completed + 1
            reader.verify(latest)
            assert value_of(reader, latest) == float(latest)
            assert reader.load_local(latest)["seen"] == latest
            completed = latest
    assert completed >= 30


def crash_at(folder: str, event_number: int, step: int) -> None:
    """Save `step` and prune, and die at the n-th thing that does to the file system."""
    store = CheckpointStore(folder)
    seen = 0

    def audit(event: str, args: tuple) -> None:
        nonlocal seen
        touches = event in {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "shutil.rmtree"}
        if touches or (event == "open" and str(args[0]).startswith(folder)):
            if seen == event_number:
                os._exit(9)
            seen += 1

    sys.addaudithook(audit)
    save_small(store, step)
    store.prune(keep_last=1, keep_best=0)


def crash_everywhere(folder: str, again: bool, connection) -> None:
    """Crash a save at its first file operation, then one at its second, and so on; check what each leaves."""
    store, step = CheckpointStore(folder), 0
    for event_number in range(1000):
        step += 0 if again else 1
        child = os.fork()
        if child == 0:
            crash_at(folder, event_number, step)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        latest = store.latest()
        assert latest in ({0} if again else {step - 1, step})
        assert value_of(store, latest) == float(latest)
        step = latest
        if code == 0:
            connection.send((event_number, step))
            return


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
def test_a_crash_at_any_file_operation_leaves_a_good_checkpoint(tmp_path, again):
    store = CheckpointStore(tmp_path)
    save_small(store, 0)
    store.close()
    ours, theirs = multiprocessing.Pipe()
    process = start(crash_everywhere, str(tmp_path), again, theirs)
    theirs.close()
    crashes, step = ours.recv()
    process.join()
    assert crashes > 15
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "latest", f"step_{step:08d}"]


def save_forever_on_ranks(rank: int, world: int, rendezvous: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    store = store_of_rank(folder)
    for step in range((store.latest() or 0) + 1, 100_000):
        mesh = init_device_mesh("cpu", (world,))
        shard = lay_out(torch.full((6, 2), float(step)), mesh, [Shard(0)])
        store.save(step, {"shard": shard, "plain": torch.tensor(step)}, {}, {})
        store.prune(keep_last=2, keep_best=0)


def test_killing_one_of_two_ranks_leaves_a_checkpoint_that_loads(tmp_path):
    draw = random.Random(7)
    folder, reader = tmp_path / "checkpoints", CheckpointStore(tmp_path / "checkpoints")
    before = 0
    for attempt in range(6):
        rendezvous = str(tmp_path / f"rendezvous{attempt}")
        ranks = [start(save_forever_on_ranks, rank, 2, rendezvous, str(folder)) for rank in range(2)]
        deadline = time.monotonic() + 30
        while (reader.latest() or 0) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.1))
        for process in ranks if attempt % 2 else ranks[::-1]:
            process.kill()
            process.join()
        latest = reader.latest()
        assert latest is not None and latest >= before + 2
        tensors = {"shard": torch.zeros(6, 2), "plain": torch.tensor(0)}
        reader.load(latest, tensors)
        assert (tensors["shard"] == latest).all() and tensors["plain"] == latest
        before = latest


# --- full and read-only disks ----------------------------------------------------------------------------------------


def mount(folder: Path, options: str) -> None:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("mounting a small file system needs root")


@pytest.fixture
def tiny_disk(tmp_path):
    folder = tmp_path / "disk"
    mount(folder, "size=1m")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(tiny_disk, wait):
    store = CheckpointStore(tiny_disk / "checkpoints")
    save_small(store, 1)
    for _ in range(3):
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            store.save(2, {"big": torch.zeros(2_000_000)}, {}, {}, wait=wait).wait()
        assert "step_00000002" in caught.value.what and "free space" in caught.value.mend
    assert store.latest() == 1 and value_of(store, 1) == 1.0
    save_small(CheckpointStore(tiny_disk / "checkpoints"), 3)
    assert Shelf(tiny_disk / "checkpoints").steps() == [1, 3]


def saves_or_says_full(store: CheckpointStore, step: int) -> bool:
    try:
        save_small(store, step)
    except CheckpointError as exc:
        if "No space left" not in exc.what:
            raise
        return False
    return True


def test_a_disk_that_fills_up_at_any_byte_leaves_the_last_checkpoint(tiny_disk):
    folder = tiny_disk / "checkpoints"
    store = CheckpointStore(folder)
    save_small(store, 1)
    failures = 0
    for free_pages in range(0, 14):
        ballast = tiny_disk / "ballast"
        with open(ballast, "wb") as stream:
            room = os.statvfs(tiny_disk)
            stream.write(b"x" * ((room.f_bavail - free_pages) * room.f_bsize))
        latest = store.latest()
        if not saves_or_says_full(store, latest + 1):
            failures += 1
            assert store.latest() == latest
        ballast.unlink()
        assert value_of(store, store.latest()) == float(store.latest())
        store.prune(keep_last=1, keep_best=0)
    assert 2 <= failures <= 12


def test_a_read_only_disk_is_named_and_leaves_the_last_checkpoint(tiny_disk):
    store = CheckpointStore(tiny_disk / "checkpoints")
    save_small(store, 1)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system") as caught:
        save_small(store, 2)
    assert str(tiny_disk) in caught.value.what and "run.dir" in caught.value.mend
    assert value_of(store, 1) == 1.0
    assert CheckpointStore(tiny_disk / "checkpoints").latest() == 1


def one_rank_fails(folder: str, where: str) -> tuple[str, int | None]:
    import moeflow.train.checkpoint as module
    from moeflow.train import shards

    store = store_of_rank(folder)
    store.save(1, {"x": torch.tensor(1)}, {}, {})
    if store.rank == 1:

        def fail(*args, **kwargs):
            raise OSError(28, "No space left on device", "/the/disk")

        if where == "tensors":
            shards._Writer.write_data = fail
        elif where == "local state":
            shards.write_local = fail
        else:
            module.manifest.entries = fail
    with pytest.raises(CheckpointError) as caught:
        store.save(2, {"x": torch.tensor(2)}, {}, {})
    return str(caught.value), store.latest()


@pytest.mark.parametrize("where", ["tensors", "local state", "checksums"])
def test_a_failure_of_one_rank_is_raised_on_all(tmp_path, where):
    first, second = run_ranks(one_rank_fails, 2, str(tmp_path), where)
    assert first == second and first[1] == 1
    assert "rank 1" in first[0] and "No space left on device" in first[0] and "/the/disk" in first[0]
    assert not list(tmp_path.glob("*.tmp"))


def defect_on_one_rank(folder: str) -> str:
    store = store_of_rank(folder)
    try:
        store.save(1, {"x": torch.tensor(1)}, {"bad": object()} if store.rank == 1 else {}, {})
    except Exception as exc:
        return type(exc).__name__
    return "saved"


def test_a_defect_keeps_its_own_type_and_still_ends_the_other_ranks(tmp_path):
    assert run_ranks(defect_on_one_rank, 2, str(tmp_path)) == ["CheckpointError", "TypeError"]


# --- in the background -----------------------------------------------------------------------------------------------


def test_a_background_save_holds_the_values_of_its_moment(tmp_path):
    store = CheckpointStore(tmp_path)
    tensors, local = small(1.0), {"state": torch.zeros(3), "list": [1]}
    for step in (1, 2, 3):
        for tensor in tensors.values():
            tensor.fill_(float(step))
        handle = store.save(step, tensors, local, {"metrics": {"a": step}}, wait=False)
        for tensor in (*tensors.values(), local["state"]):
            tensor.add_(100.0)
        local["list"].append(step)
    handle.wait()
    assert handle.done() and store.latest() == 3
    for step in (1, 2, 3):
        assert value_of(store, step) == float(step)
        assert store.load_local(step)["state"].tolist() == [100.0 * (step - 1)] * 3
        assert store.load_local(step)["list"] == [1, *range(1, step)]
    store.close()


def save_in_background(folder: str) -> list[int]:
    store = store_of_rank(folder)
    mesh = init_device_mesh("cpu", (store.world,))
    local = torch.zeros(3, 2)
    parameter = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    for step in (1, 2):
        local.fill_(float(10 * step + store.rank))
        store.save(step, {"w": parameter}, {}, {}, wait=False)
        local.fill_(-1.0)
        for _ in range(50):  # training's collectives go on meanwhile
            dist.all_reduce(torch.ones(10))
    store.wait()
    whole = torch.zeros(6, 2)
    alone = CheckpointStore(folder)
    alone.load(2, {"w": whole})
    store.close()
    return whole[:, 0].int().tolist()


def test_background_saves_of_shards_run_beside_collectives(tmp_path):
    assert run_ranks(save_in_background, 2, str(tmp_path)) == [[20] * 3 + [21] * 3] * 2
