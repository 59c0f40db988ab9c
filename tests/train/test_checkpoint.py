from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moeflow.errors import CheckpointError
from moeflow.train.checkpoint import CheckpointStore
from moeflow.train.shards import read_index
from tests.distributed import run_ranks
from tests.train.forked import start
from tests.train.small_store import bits, lay_out, save_small, small, store_of_rank, value_of

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
