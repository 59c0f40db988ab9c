"""Damaged run folders: every command ends with a result or a message, soon, and no file that it read is changed."""

import json
import os
import random
import shutil

import pytest

from moeflow.cli.main import main
from moeflow.train import manifest
from tests.cli.test_ckpt import text_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return text_run(tmp_path_factory.mktemp("mutations") / "run")


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def state(folder):
    """Content of every file; kinds of everything else."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[path] = os.readlink(path)
        else:
            found[path] = path.read_bytes() if path.is_file() else "folder"
    return found


VALUES = [None, [], {}, "", "x", -1, 0, 2**70, 1.5, True, float("nan"), [[[]]], {"a": {"b": []}}, "../../etc", "\x00"]


def replaced(value, draw):
    """A JSON value with one of its parts replaced by something of another kind."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(sorted(value))
        if draw.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: replaced(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [replaced(v, draw) if i == place else v for i, v in enumerate(value)]
    return draw.choice(VALUES)


def flip(path, draw):
    content = bytearray(path.read_bytes()) or bytearray(b"x")
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def truncate(path, draw):
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size + 1)])


def extend(path, draw):
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 100)))


def noise(path, draw):
    path.write_bytes(draw.randbytes(draw.choice([0, 1, 100, 5000])))


def remove(path, draw):
    path.unlink()


def folder_instead(path, draw):
    path.unlink()
    path.mkdir()


def loop_instead(path, draw):
    path.unlink()
    path.symlink_to(path.name)


def swap(path, draw):
    other = draw.choice(files(path.parent))
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def other_json(path, draw):
    """Another JSON, with checksums that fit: nothing else tells that it is damaged."""
    step = next(parent for parent in (path, *path.parents) if parent.parent.name == "checkpoints")
    target = step / draw.choice([manifest.NAME, "meta.json", "meta.json"])
    try:
        content = replaced(json.loads(target.read_bytes()), draw)
        target.write_text(json.dumps(content))
        own = json.loads((step / manifest.NAME).read_bytes())
        own.pop("checksum", None)
        if target.name == "meta.json":
            own["files"]["meta.json"] = manifest.entries(step, [target])["meta.json"]
        text = json.dumps({**own, "checksum": manifest._checksum(own)})
        (step / manifest.NAME).write_text(text)
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        flip(target, draw) if target.is_file() else None  # damaged already, or no table any more


MUTATIONS = [flip, truncate, extend, noise, remove, folder_instead, loop_instead, swap, other_json, other_json]


def mutate(folder, draw):
    checkpoint = folder / "checkpoints" / draw.choice(["step_00000004", "step_00000004", "step_00000002"])
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        inside = files(checkpoint)
        if draw.random() < 0.15:
            inside = [p for p in (folder / "checkpoints" / "latest", folder / "config.yaml") if p.is_file()]
        if draw.random() < 0.05:
            checkpoint.rename(checkpoint.with_name(draw.choice(["step_00000009", "step_00000004.old", "step_x", "9"])))
            return
        if not inside:
            return
        path = draw.choice(inside)
        mutation = draw.choice(MUTATIONS)
        if mutation is other_json and checkpoint not in path.parents:
            mutation = noise
        mutation(path, draw)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2, 3))])
def test_a_hundred_damaged_folders(run, tmp_path, capsys, part):
    wrong = 0
    for seed in range(25 * part, 25 * part + 25):
        draw = random.Random(seed)
        folder = shutil.copytree(run, tmp_path / f"run{seed}")
        mutate(folder, draw)
        before = state(folder)
        for words in (
            ["ckpt", "ls", str(folder)],
            ["ckpt", "verify", str(folder)],
            ["ckpt", "reshard", str(folder), str(tmp_path / f"new{seed}")],
            ["resume", str(folder), "--dry-run"],
        ):
            code = main(words)
            out, err = capsys.readouterr()
            assert code in (0, 2), (seed, words, err)
            assert "Traceback" not in out + err, (seed, words)
            assert (code == 0) or err.startswith("error: ") or "step" in out, (seed, words, err)
            assert state(folder) == before, (seed, words)
            wrong += code == 2
        assert code == 0 or not (tmp_path / f"new{seed}").exists() or words[0] == "resume"
    assert wrong >= 25


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resuming_from_fifty_damaged_folders(run, tmp_path):
    from tests.train.runs import moeflow

    for seed in range(50):
        draw = random.Random(1000 + seed)
        folder = shutil.copytree(run, tmp_path / f"run{seed}")
        mutate(folder, draw)
        before = state(folder / "checkpoints")
        done = moeflow("resume", str(folder), "trainer.stop_at=5", "-q", check=False, timeout=120)
        assert done.returncode in (0, 2), (seed, done.stderr)
        assert "Traceback" not in done.stdout + done.stderr, (seed, done.stderr)
        if done.returncode:
            after = state(folder / "checkpoints")
            # The lock names the process that held it last.
            assert {p: after.get(p) for p in before if p.name != ".lock"} == {
                p: value for p, value in before.items() if p.name != ".lock"
            }, seed
