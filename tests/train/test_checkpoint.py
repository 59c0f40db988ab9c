from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moeflow.errors import CheckpointError
from moeflow.train.checkpoint import CheckpointStore
from moeflow.train.shards import read_index
from moeflow.train.shelf import Shelf
from tests.distributed import run_ranks
from tests.train.forked import start


def store_of_rank(folder: str) -> CheckpointStore:
    return CheckpointStore(folder, rank=dist.get_rank(), world=dist.get_world_size())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def small(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((5, 3), value), "b": torch.full((7,), value, dtype=torch.float64)}


def save_small(store: CheckpointStore, step: int, **metrics: float) -> None:
    store.save(step, small(float(step)), {"seen": step}, {"metrics": metrics})


def value_of(store: CheckpointStore, step: int) -> float:
    tensors = small(-1.0)
    store.load(step, tensors)
    values = {x for tensor in tensors.values() for x in tensor.flatten().tolist()}
    assert len(values) == 1, "half of one checkpoint, half of another"
    return values.pop()


# --- round trips -----------------------------------------------------------------------------------------------------

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def every_kind() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=generator)
    tensors = {}
    for dtype in DTYPES:
        raw = noise % 2 if dtype == torch.bool else noise
        tensors[f"{dtype}"] = raw.view(dtype).reshape(8, -1)
        tensors[f"{dtype}.scalar"] = raw.view(dtype)[3].clone()
        tensors[f"{dtype}.empty"] = torch.empty(0, 4, dtype=dtype)
    tensors["transposed"] = torch.randn(6, 10, generator=generator).t()
    tensors["slice"] = torch.randn(100, generator=generator)[10:20:2]
    tensors["channels_last"] = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    tensors["parameter"] = torch.nn.Parameter(torch.randn(3, generator=generator))
    tensors["special"] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    return tensors


def test_every_dtype_and_shape_comes_back_to_the_bit(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    saved = every_kind()
    local = {
        "rng/torch": torch.get_rng_state(), "rng/python": list(random.getstate()[1]), "gauss": 0.1 + 0.2,
        "nan": float("nan"), "none": None, "scalar": torch.tensor(7),
    }  # fmt: skip
    store.save(3, saved, local, {"tokens": 12, "metrics": {"eval/accuracy": torch.tensor(0.5), "loss": float("nan")}})

    loaded = {key: torch.zeros_like(value, memory_format=torch.contiguous_format) for key, value in saved.items()}
    loaded["parameter"] = torch.nn.Parameter(loaded["parameter"])
    addresses = {key: value.data_ptr() for key, value in loaded.items()}
    store.load(3, loaded)
    for key, value in saved.items():
        assert bits(loaded[key]) == bits(value), key
        assert loaded[key].data_ptr() == addresses[key], "loading is in place"
    back = store.load_local(3)
    assert torch.equal(back["rng/torch"], local["rng/torch"])
    assert back["scalar"].shape == () and back["scalar"] == 7
    assert (back["rng/python"], back["gauss"], back["none"]) == (local["rng/python"], local["gauss"], None)
    assert back["nan"] != back["nan"]
    meta = store.read_meta(3)
    assert (meta["step"], meta["world"], meta["tokens"]) == (3, 1, 12)
    assert meta["metrics"] == {"eval/accuracy": 0.5, "loss": "NaN"}
    assert (store.steps(), store.latest()) == ([3], 3)


def test_new_store_has_nothing_and_reading_makes_no_folder(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    assert (store.steps(), store.latest(), store.best()) == ([], None, None)
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
        store.load(5, {})


FULL = {
    "rows": torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6),  # 7 rows: uneven, and empty on some of 4 ranks
    "few": torch.arange(2 * 3, dtype=torch.bfloat16).reshape(2, 3),
    "columns": torch.arange(3 * 5, dtype=torch.int64).reshape(3, 5),
    "replica": torch.arange(4, dtype=torch.float64),
    "experts": torch.arange(8 * 3 * 2, dtype=torch.float32).reshape(8, 3, 2),
}


def lay_out(full: torch.Tensor, mesh: DeviceMesh, placements: list) -> DTensor:
    """This rank's part of `full` as a DTensor, cut by hand: chunks of ceil(size / ranks), the last short or empty."""
    part, coordinate = full, mesh.get_coordinate()
    for place, ranks, index in zip(placements, mesh.shape, coordinate, strict=True):
        if isinstance(place, Shard):
            size = full.shape[place.dim]
            chunk = -(-size // ranks)
            start = min(index * chunk, size)
            part = part.narrow(place.dim, start, min(chunk, size - start))
    local = part.clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def sharded(world: int, fill: bool) -> dict[str, torch.Tensor]:
    """FULL laid out over `world` ranks; zeros where `fill` is false."""
    full = {key: value.clone() if fill else torch.zeros_like(value) for key, value in FULL.items()}
    if world == 1:
        return full
    flat = init_device_mesh("cpu", (world,))
    placements = {"rows": [Shard(0)], "few": [Shard(0)], "columns": [Shard(1)], "replica": [Replicate()]}
    tensors: dict[str, torch.Tensor] = {key: lay_out(full[key], flat, place) for key, place in placements.items()}
    if world % 2 == 0:
        grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("edp", "ep"))
        tensors["experts"] = lay_out(full["experts"], grid, [Replicate(), Shard(0)])
    else:
        tensors["experts"] = lay_out(full["experts"], flat, [Shard(1)])
    return tensors


def stage_keys(rank: int, world: int, stages: int = 2) -> list[str]:
    """Keys of a rank's pipeline stage when `world` ranks hold the layers of `stages` stages between them."""
    return [f"layer{layer}" for layer in range(stages) if layer % world == rank % stages % world or world == 1]


def save_sharded(folder: str) -> list[int]:
    store = store_of_rank(folder) if dist.is_initialized() else CheckpointStore(folder)
    rank, world = store.rank, store.world
    tensors = sharded(world, fill=True)
    tensors |= {key: torch.full((3,), float(key[-1])) for key in stage_keys(rank, world)}
    tensors["plain"] = torch.tensor(5)
    store.save(10, tensors, {"rank": rank, "state": torch.full((rank + 1,), rank)}, {"world_was": world})
    store.close()
    return store.steps()


def load_sharded(folder: str) -> int:
    store = store_of_rank(folder) if dist.is_initialized() else CheckpointStore(folder)
    rank, world = store.rank, store.world
    tensors = sharded(world, fill=False)
    tensors |= {key: torch.zeros(3) for key in stage_keys(rank, world)}
    tensors["plain"] = torch.tensor(0)
    store.load(10, tensors)
    for key, wanted in sharded(world, fill=True).items():
        value = tensors[key]
        if isinstance(value, DTensor):
            value, wanted = value.to_local(), wanted.to_local()
        assert torch.equal(value, wanted), key
    for key in stage_keys(rank, world):
        assert tensors[key].tolist() == [float(key[-1])] * 3
    assert tensors["plain"] == 5
    saved_by = store.read_meta(10)["world"]
    if rank < saved_by:
        local = store.load_local(10)
        assert local["rank"] == rank and local["state"].tolist() == [rank] * (rank + 1)
    else:
        with pytest.raises(CheckpointError, match=f"saved by {saved_by} ranks"):
            store.load_local(10)
    return saved_by


@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_shards_load_on_any_number_of_ranks(tmp_path, saved_by):
    folder = str(tmp_path / "checkpoints")
    if saved_by == 1:
        assert save_sharded(folder) == [10]
    else:
        assert run_ranks(save_sharded, saved_by, folder) == [[10]] * saved_by
    load_sharded(folder)
    for world in (2, 3, 4):
        assert run_ranks(load_sharded, world, folder) == [saved_by] * world


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "strict", "message"),
    [
        ({"a": torch.zeros(5, 3)}, True, "'b' is in the checkpoint alone"),
        ({**small(0), "aa": torch.zeros(1)}, True, "'aa' is not in the checkpoint. Did you mean 'a'"),
        ({"a": torch.zeros(5, 4)}, False, r"'a' is \[5, 3\] in the checkpoint and \[5, 4\] in the model"),
        ({"a": torch.zeros(5, 3).double()}, False, "'a' is torch.float32 in the checkpoint and torch.float64"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, wanted, strict, message):
    store = CheckpointStore(tmp_path)
    save_small(store, 1)
    before = {key: value.clone() for key, value in wanted.items()}
    with pytest.raises(CheckpointError, match=message):
        store.load(1, wanted, strict=strict)
    assert all(torch.equal(before[key], value) for key, value in wanted.items())


def test_a_part_can_be_read_when_not_strict(tmp_path):
    store = CheckpointStore(tmp_path)
    save_small(store, 1)
    part = {"a": torch.zeros(5, 3)}
    store.load(1, part, strict=False)
    assert torch.equal(part["a"], torch.ones(5, 3))


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def lead_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink, replace_by_folder, replace_by_pipe, lead_nowhere])
def test_every_damaged_file_is_named_and_the_step_before_is_offered(tmp_path, harm):
    run_dir = tmp_path / "run"
    names = sorted(path.relative_to(run_dir) for path in _three_steps(run_dir))
    assert "manifest.json" in {name.name for name in names}
    for name in names:
        files = _three_steps(run_dir)
        store = CheckpointStore(run_dir / "checkpoints")
        harm(run_dir / name)
        assert store.latest() == 3, "it is told of, not passed over"
        before = {path: path.read_bytes() for path in files if path.is_file()}
        tensors = small(-1.0)
        with pytest.raises(CheckpointError) as caught:
            store.load(3, tensors)
        assert name.name in caught.value.what
        assert caught.value.mend == f"resume from step 2: moeflow resume {run_dir} --step 2"
        assert all((tensor == -1.0).all() for tensor in tensors.values())
        assert all(path.read_bytes() == content for path, content in before.items()), "nothing is mended by itself"
        assert value_of(store, 2) == 2.0


def _three_steps(run_dir: Path) -> list[Path]:
    """Make checkpoints 1, 2, 3 anew and return the files of the last."""
    subprocess.run(["rm", "-rf", str(run_dir)], check=True)
    store = CheckpointStore(run_dir / "checkpoints")
    for step in (1, 2, 3):
        save_small(store, step)
    store.close()
    files = [path for path in (run_dir / "checkpoints" / "step_00000003").rglob("*") if path.is_file()]
    assert len(files) == 5
    return files


def test_the_offered_step_is_one_that_is_good_itself(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save_small(store, step)
        if step > 1:
            truncate(tmp_path / f"step_{step:08d}" / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="truncated") as caught:
        store.verify(3)
    assert "resume from step 1" in caught.value.mend
    truncate(tmp_path / "step_00000001" / "meta.json")
    with pytest.raises(CheckpointError, match="start the run anew"):
        store.verify(3)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch evil",))


def test_an_index_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_small(CheckpointStore(tmp_path), 1)
    assert read_index(tmp_path / "step_00000001").state_dict_metadata
    (tmp_path / "step_00000001" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="has no place in a checkpoint's index"):
        CheckpointStore(tmp_path).load(1, small(0), verify=False)
    assert not (tmp_path / "evil").exists()


def load_damaged(folder: str) -> str:
    store = store_of_rank(folder)
    with pytest.raises(CheckpointError) as caught:
        store.load(10, sharded(store.world, fill=False), strict=False)
    return str(caught.value)


def test_damage_is_raised_on_every_rank(tmp_path):
    run_ranks(save_sharded, 2, str(tmp_path))
    flip(tmp_path / "step_00000010" / "__1_0.distcp")
    first, second = run_ranks(load_damaged, 2, str(tmp_path))
    assert first == second and "__1_0.distcp is damaged" in first


# --- pointer, pruning, replacing, locking ----------------------------------------------------------------------------


def test_prune_keeps_the_last_the_best_and_the_latest(tmp_path):
    store = CheckpointStore(tmp_path)
    for step, accuracy in ((1, 0.9), (2, 0.5), (3, float("nan")), (4, 0.9), (5, 0.1), (6, 0.2)):
        save_small(store, step, **{"eval/accuracy": accuracy, "eval/loss": 1 - accuracy})
    assert store.best() == 4 and store.best("eval/loss", "min") == 4 and store.best("nothing") is None
    assert store.prune(keep_last=2, keep_best=1) == [1, 2, 3]
    assert store.steps() == [4, 5, 6]
    assert store.prune(keep_last=1, keep_best=0) == [4, 5]
    assert store.latest() == 6 and value_of(store, 6) == 6.0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "latest", "step_00000006"]


def test_going_on_from_an_earlier_step_drops_the_later_ones_after_the_next_save(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        save_small(store, step, **{"eval/accuracy": step})
    store.rewind(2)
    assert store.latest() == 2 and store.steps() == [1, 2, 3, 4]
    store.save(3, small(33.0), {}, {"metrics": {}})
    assert value_of(store, 3) == 33.0 and store.latest() == 3
    assert store.prune(keep_last=2, keep_best=1) == [1, 4]
    assert store.steps() == [2, 3]


def test_a_lost_or_spoilt_pointer_gives_the_newest_step(tmp_path):
    store = CheckpointStore(tmp_path)
    save_small(store, 1)
    save_small(store, 2)
    for content in (b"step_00000099\n", b"\xff\x00 rubbish", b""):
        (tmp_path / "latest").write_bytes(content)
        assert store.latest() == 2
    (tmp_path / "latest").unlink()
    assert store.latest() == 2
    store.rewind(1)
    assert store.latest() == 1


def test_damage_to_an_old_checkpoint_ends_no_run(tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save_small(store, step, **{"eval/accuracy": step})
    (tmp_path / "step_00000001" / "meta.json").write_text("[]")
    (tmp_path / "step_00000002" / "meta.json").unlink()
    save_small(store, 4)
    assert store.prune(keep_last=1, keep_best=1) == [1, 2]
    assert store.best() == 3
    assert "step_00000001/meta.json" in caplog.text and "step_00000002/meta.json" in caplog.text


def test_commands_hold_paths_as_the_shell_takes_them(tmp_path):
    run_dir = tmp_path / "two words"
    store = CheckpointStore(run_dir / "checkpoints")
    for step in (1, 2):
        save_small(store, step)
    flip(run_dir / "checkpoints" / "step_00000002" / "__0_0.distcp")
    with pytest.raises(CheckpointError) as caught:
        store.verify(2)
    command = caught.value.mend.partition(": ")[2]
    assert shlex.split(command) == ["moeflow", "resume", str(run_dir), "--step", "1"]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    save_small(store, 1)
    store.save(1, small(11.0), {}, {})
    assert value_of(store, 1) == 11.0 and store.steps() == [1]


def other_run(folder: str, connection) -> None:
    store = CheckpointStore(folder)
    try:
        store.claim()
        connection.send("claimed")
    except CheckpointError as exc:
        connection.send(str(exc))
    connection.recv()


def _other_run(folder: Path):
    ours, theirs = multiprocessing.Pipe()
    process = start(other_run, str(folder), theirs)
    assert ours.poll(30)
    return process, ours, ours.recv()


def test_two_live_runs_never_share_a_folder_and_a_killed_one_does_not_block_it(tmp_path):
    process, _, answer = _other_run(tmp_path)
    assert answer == "claimed"
    (tmp_path / "step_00000001.tmp").mkdir()
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=f"in use: .*process {process.pid}"):
        save_small(store, 1)
    assert (tmp_path / "step_00000001.tmp").exists(), "what the live run writes is left alone"
    process.kill()
    process.join()
    save_small(store, 1)
    assert value_of(store, 1) == 1.0
    process, ours, answer = _other_run(tmp_path)
    assert "another run writes its checkpoints there" in answer
    ours.send("end")
    process.join()
    store.close()
    process, ours, answer = _other_run(tmp_path)
    assert answer == "claimed"
    ours.send("end")
    process.join()


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
