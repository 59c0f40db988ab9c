"""What `build` gives for the cifar10 option: where it looks, what it falls back to, and what it refuses."""

from __future__ import annotations

import builtins
import os
import pickle
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from moeflow.data import archive, augment, build, cifar10, locate, synthetic
from moeflow.data.images import DrawnPixels, ImageDataset
from moeflow.errors import ConfigError, DataError
from moeflow.schema import CifarData, DataConfig
from tests.data.formats import PY_FILES, ROWS, known_archive, pack


def places(folder: Path, tmp_path: Path) -> dict[str, Path]:
    """The usual places, as this test's HOME and working directory have them."""
    return {"work": tmp_path / "work" / "data", "cache": tmp_path / "home" / ".cache" / "moeflow" / "data"}


def expected(small, files: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = np.concatenate([small[name][0] for name in files]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([small[name][1] for name in files])
    return augment.normalize(torch.from_numpy(pixels), cifar10.MEAN, cifar10.STD), torch.from_numpy(labels)


def test_real_images_from_a_named_root(small, python_folder: Path):
    for root in (python_folder, python_folder.parent):
        bundle = build(CifarData(root=str(root), augment=False), seed=0)
        assert (bundle.source, bundle.name, bundle.num_classes) == ("real", "cifar10", 10)
        assert bundle.notice is None
        assert bundle.origin == str(python_folder)
        for dataset, files in ((bundle.train, PY_FILES[:5]), (bundle.eval, PY_FILES[5:])):
            inputs, targets = expected(small, files)
            order = torch.from_numpy(np.random.default_rng(0).permutation(len(dataset)))
            batch = dataset.fetch(order, epoch=3)
            assert torch.equal(batch["inputs"], inputs[order])
            assert torch.equal(batch["targets"], targets[order])
            assert (batch["inputs"].dtype, batch["targets"].dtype) == (torch.float32, torch.int64)


def test_training_images_are_augmented_and_test_images_are_not(small, python_folder: Path):
    bundle = build(CifarData(root=str(python_folder), crop_padding=3, crop_fill="zero"), seed=9)
    ids = torch.arange(5 * ROWS)
    raw = torch.from_numpy(np.concatenate([small[name][0] for name in PY_FILES[:5]]).reshape(-1, 3, 32, 32))
    moved = augment.crop_and_flip(raw, ids, seed=9, epoch=4, padding=3, fill="zero")
    assert not torch.equal(moved, raw)
    assert torch.equal(bundle.train.fetch(ids, 4)["inputs"], augment.normalize(moved, cifar10.MEAN, cifar10.STD))
    plain = expected(small, PY_FILES[5:])[0]
    assert torch.equal(bundle.eval.fetch(torch.arange(ROWS), 4)["inputs"], plain)


def test_channels_last_changes_strides_only(small, python_folder: Path):
    ids = torch.arange(7)
    plain = build(CifarData(root=str(python_folder)), 0).train.fetch(ids, 0)["inputs"]
    last = build(CifarData(root=str(python_folder), channels_last=True), 0).train.fetch(ids, 0)["inputs"]
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)


def test_usual_places_in_order(small, python_folder: Path, binary_folder: Path, tmp_path: Path, monkeypatch):
    usual = places(python_folder, tmp_path)
    named = tmp_path / "named"
    monkeypatch.setenv("MOEFLOW_DATA", str(named))
    cfg = CifarData(download=False)
    assert build(cfg, 0).source == "synthetic"
    for place, source in ((usual["cache"], python_folder), (usual["work"], binary_folder), (named, python_folder)):
        shutil.copytree(source, place / source.name)
        assert build(cfg, 0).origin == str(place / source.name)
    assert build(CifarData(download=False, root=str(usual["work"])), 0).origin == str(
        usual["work"] / binary_folder.name
    )


def test_both_layouts_have_one_fingerprint_and_other_data_another(small, python_folder: Path, binary_folder: Path):
    prints = [build(CifarData(root=str(folder)), 0).fingerprint for folder in (python_folder, binary_folder)]
    assert prints[0] == prints[1]
    pixels, labels = small["data_batch_3"]
    labels[2] = (labels[2] + 1) % 10
    (python_folder / "data_batch_3").write_bytes(pickle.dumps({"data": pixels, "labels": labels}))
    changed = build(CifarData(root=str(python_folder)), 0).fingerprint
    assert changed != prints[0]
    assert build(CifarData(root=str(python_folder), eval_samples=3), 0).fingerprint not in (changed, prints[0])


def test_an_archive_in_the_root_is_unpacked(small, binary_folder: Path, tmp_path: Path, monkeypatch):
    root = tmp_path / "root"
    root.mkdir()
    path = pack(binary_folder, root / "cifar-10-binary.tar.gz")
    monkeypatch.setattr(archive, "ARCHIVES", (archive.PYTHON, known_archive(path)))
    bundle = build(CifarData(root=str(root)), 0)
    assert bundle.origin == str(root / "cifar-10-batches-bin")
    assert len(bundle.train) == 5 * ROWS


def test_a_damaged_archive_is_an_error_even_where_going_on_is_allowed(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MOEFLOW_DATA", str(tmp_path))
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(b"half a download")
    with pytest.raises(DataError, match=f"{path} is not the published archive: it has 15 bytes"):
        build(CifarData(on_missing="synthetic"), 0)
    assert path.read_bytes() == b"half a download"


def test_a_damaged_file_is_an_error_even_where_going_on_is_allowed(small, python_folder: Path, monkeypatch):
    monkeypatch.setenv("MOEFLOW_DATA", str(python_folder))
    (python_folder / "test_batch").write_bytes(b"")
    with pytest.raises(DataError, match="test_batch is damaged"):
        build(CifarData(), 0)


@pytest.mark.parametrize("source", ["auto", "real"])
@pytest.mark.parametrize("download", [True, False])
def test_a_root_that_was_named_must_exist_and_hold_the_data(tmp_path: Path, source: str, download: bool):
    cfg = CifarData(root=str(tmp_path / "typo"), source=source, download=download)
    with pytest.raises(DataError, match=f"data.root={tmp_path}/typo does not exist"):
        build(cfg, 0)
    (tmp_path / "typo").mkdir()
    with pytest.raises(DataError, match=f"data.root={tmp_path}/typo holds no CIFAR-10 .*no download") as caught:
        build(cfg, 0)
    assert locate.download.URL in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, a folder was expected"):
        build(CifarData(root=str(tmp_path / "file")), 0)


@pytest.mark.parametrize(
    ("cfg", "key"),
    [
        (CifarData(on_missing="error"), "data.on_missing=error"),
        (CifarData(source="real"), "data.source=real"),
        (CifarData(source="real", on_missing="error", download=False), "data.source=real"),
    ],
)
def test_going_on_without_data_can_be_forbidden(cfg: CifarData, key: str):
    with pytest.raises(DataError, match=f"CIFAR-10 was not found, and {key} forbids") as caught:
        build(cfg, 0)
    assert "data.source=synthetic" in str(caught.value)
    assert "data.root=FOLDER" in str(caught.value)


def test_without_data_and_network_the_drawn_set_says_so():
    started = time.monotonic()
    bundle = build(CifarData(), seed=0)
    assert time.monotonic() - started < 3
    assert (bundle.source, bundle.name, bundle.num_classes) == ("synthetic", "synthetic-figures", 10)
    assert (len(bundle.train), len(bundle.eval)) == (50_000, 10_000)
    assert bundle.notice is not None
    for words in ("SYNTHETIC DATA", "not CIFAR-10", "no connection to 127.0.0.1", "data.on_missing=error"):
        assert words in bundle.notice
    for words in (locate.download.URL, "data.root=FOLDER", "MOEFLOW_DATA", str(Path.cwd() / "data")):
        assert words in bundle.notice


def test_synthetic_touches_neither_disk_nor_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"touched {args}")

    monkeypatch.setenv("MOEFLOW_DATA", str(tmp_path))
    for owner, names in ((os, ("open", "stat", "mkdir", "scandir")), (socket, ("socket", "getaddrinfo"))):
        for name in names:
            monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(builtins, "open", refuse)
    bundle = build(CifarData(source="synthetic", root="/nowhere"), 0)
    batch = bundle.train.fetch(torch.arange(4), 0)
    monkeypatch.undo()
    assert bundle.source == "synthetic"
    assert bundle.notice is not None
    assert "data.source=synthetic was asked for" in bundle.notice
    assert batch["inputs"].shape == (4, 3, 32, 32)


def test_first_samples_only(small, python_folder: Path):
    whole = build(CifarData(root=str(python_folder), augment=False), 0)
    some = build(CifarData(root=str(python_folder), augment=False, train_samples=33, eval_samples=7), 0)
    assert (len(some.train), len(some.eval)) == (33, 7)
    for ours, theirs in ((some.train, whole.train), (some.eval, whole.eval)):
        ids = torch.arange(len(ours))
        assert torch.equal(ours.fetch(ids, 0)["inputs"], theirs.fetch(ids, 0)["inputs"])
    drawn = build(CifarData(source="synthetic", train_samples=12, eval_samples=3), 0)
    assert (len(drawn.train), len(drawn.eval)) == (12, 3)


@pytest.mark.parametrize(
    ("fields", "key"), [({"train_samples": 50_001}, "train_samples=50001"), ({"eval_samples": 10_001}, "eval_samples")]
)
def test_more_samples_than_there_are(fields: dict, key: str):
    with pytest.raises(ConfigError, match=f"data.{key}"):
        build(CifarData(source="synthetic", **fields), 0)


def test_unknown_data_set():
    with pytest.raises(ConfigError, match=r"data\.name=cifar100 is not .* Did you mean 'cifar10'"):
        build(DataConfig(name="cifar100"), 0)


def test_drawn_images_are_drawn_once_and_in_any_order(monkeypatch: pytest.MonkeyPatch):
    drawn: list[int] = []
    draw = synthetic.draw_images

    def spy(ids, **kwargs):
        drawn.extend(ids.tolist())
        return draw(ids, **kwargs)

    monkeypatch.setattr(synthetic, "draw_images", spy)
    pixels = DrawnPixels(100, True)
    first = pixels.take(torch.tensor([7, 3, 99]))
    second = pixels.take(torch.tensor([3, 50, 7]))
    assert drawn == [7, 3, 99, 50]
    assert torch.equal(first[[1, 0]], second[[0, 2]])
    assert torch.equal(second, torch.from_numpy(draw(np.array([3, 50, 7]), seed=0, train=True)))


def test_a_pickled_drawn_set_is_small_and_the_same():
    dataset = ImageDataset(DrawnPixels(10_000, False), mean=synthetic.MEAN, std=synthetic.STD)
    before = dataset.fetch(torch.tensor([5, 9_999]), 0)
    raw = pickle.dumps(dataset)
    assert len(raw) < 2000
    again = pickle.loads(raw).fetch(torch.tensor([5, 9_999]), 0)
    assert torch.equal(before["inputs"], again["inputs"])
    assert torch.equal(before["targets"], again["targets"])


@pytest.mark.slow
def test_the_real_images(real_cifar10: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOEFLOW_DATA", str(real_cifar10))
    build(CifarData(), 0)  # brings the files into the page cache
    started = time.process_time()
    bundle = build(CifarData(augment=False), 0)
    assert time.process_time() - started < 1.5
    assert (bundle.source, len(bundle.train), len(bundle.eval)) == ("real", 50_000, 10_000)
    batch = bundle.train.fetch(torch.arange(50_000), 0)
    assert torch.bincount(batch["targets"]).tolist() == [5_000] * 10
    assert batch["inputs"].mean((0, 2, 3)).abs().max() < 0.02
    assert (batch["inputs"].std((0, 2, 3)) - 1).abs().max() < 0.02
