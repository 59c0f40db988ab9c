"""Unpacking: only the published files, only in their place, all or nothing."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from moeflow.data import archive, cifar10
from moeflow.errors import DataError
from tests.data.formats import known_archive, pack


@pytest.mark.parametrize("layout", ["python", "binary"])
def test_unpacks_beside_itself(small, python_folder: Path, binary_folder: Path, tmp_path: Path, layout: str):
    source = {"python": python_folder, "binary": binary_folder}[layout]
    path = pack(source, tmp_path / f"cifar-10-{layout}.tar.gz")
    target = archive.unpack(path, known_archive(path))
    assert target == tmp_path / source.name
    for train in (True, False):
        for ours, theirs in zip(cifar10.read(target, train=train), cifar10.read(source, train=train), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert path.exists()
    assert {entry.name for entry in tmp_path.iterdir()} >= {path.name, target.name}
    assert not list(tmp_path.glob(".cifar*"))
    # once unpacked, it is not looked at again
    path.write_bytes(b"")
    assert archive.unpack(path, known_archive(path)) == target


def test_a_wrong_checksum_or_size_is_named_and_the_file_stays(small, python_folder: Path, tmp_path: Path):
    path = pack(python_folder, tmp_path / "cifar-10-python.tar.gz")
    known = known_archive(path)
    raw = path.read_bytes()
    for damaged, reason in [
        (raw[:-1], f"it has {len(raw) - 1:,} bytes, the published file has {len(raw):,}"),
        (raw[:-1] + bytes([raw[-1] ^ 1]), f"its md5 is .*, the published one is {known.md5}"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=reason) as caught:
            archive.unpack(path, known)
        assert str(path) in str(caught.value)
        assert path.read_bytes() == damaged
        assert not (tmp_path / "cifar-10-batches-py").exists()


def test_sha256_is_looked_at_as_well(small, python_folder: Path, tmp_path: Path):
    path = pack(python_folder, tmp_path / "cifar-10-python.tar.gz")
    with pytest.raises(DataError, match="its sha256 is"):
        archive.unpack(path, known_archive(path, sha256="0" * 64))


def member(name: str, content: bytes = b"x", **fields) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


@pytest.mark.parametrize(
    "evil",
    [
        member("../escaped"),
        member("cifar-10-batches-py/../../escaped"),
        member("/tmp/moeflow-escaped"),
        member("escaped"),
        member("cifar-10-batches-py/sub/escaped"),
        member("cifar-10-batches-py/link", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("cifar-10-batches-py/link", b"", type=tarfile.LNKTYPE, linkname="cifar-10-batches-py/data_batch_1"),
        member("cifar-10-batches-py", b"", type=tarfile.SYMTYPE, linkname="/tmp"),
        member("cifar-10-batches-py/pipe", b"", type=tarfile.FIFOTYPE),
        member("cifar-10-batches-py/device", b"", type=tarfile.CHRTYPE),
        member("other", b"", type=tarfile.DIRTYPE),
    ],
    ids=lambda evil: f"{evil[0].name}-{evil[0].type.decode()}",
)
@pytest.mark.parametrize("first", [True, False])
def test_evil_members_are_refused(small, python_folder: Path, tmp_path: Path, evil, first: bool):
    path = tmp_path / "in" / "cifar-10-python.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as tar:
        if first:
            tar.addfile(evil[0], io.BytesIO(evil[1]))
        tar.add(python_folder, arcname=python_folder.name)
        if not first:
            tar.addfile(evil[0], io.BytesIO(evil[1]))
    with pytest.raises(DataError, match="is not a plain file in place"):
        archive.unpack(path, known_archive(path))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert not list(tmp_path.rglob("*escaped*"))


def test_huge_missing_and_doubled_members(small, python_folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_MEMBER_BYTES", 10_000)
    path = pack(python_folder, tmp_path / "huge.tar.gz")
    with pytest.raises(DataError, match=r"has [\d,]+ bytes"):
        archive.unpack(path, known_archive(path))
    monkeypatch.setattr(archive, "MAX_MEMBER_BYTES", 10**6)

    (python_folder / "data_batch_5").unlink()
    path = pack(python_folder, tmp_path / "missing.tar.gz")
    with pytest.raises(DataError, match=r"\['data_batch_5'\] are missing"):
        archive.unpack(path, known_archive(path))

    path = tmp_path / "doubled.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for _ in range(2):
            tar.add(python_folder / "test_batch", arcname="cifar-10-batches-py/test_batch")
    with pytest.raises(DataError, match="cannot be unpacked"):
        archive.unpack(path, known_archive(path))
    assert not list(tmp_path.glob("cifar*"))


@pytest.mark.parametrize("content", [b"", b"no gzip at all", b"\x1f\x8b" + bytes(100)])
def test_what_is_no_archive(small, tmp_path: Path, content: bytes):
    path = tmp_path / "cifar-10-python.tar.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be unpacked"):
        archive.unpack(path, known_archive(path))


def test_an_archive_cut_off_inside(small, python_folder: Path, tmp_path: Path):
    path = pack(python_folder, tmp_path / "cifar-10-python.tar.gz")
    path.write_bytes(path.read_bytes()[:-20_000])
    with pytest.raises(DataError, match=r"ended before the end|ends too early"):
        archive.unpack(path, known_archive(path))
    assert [entry.name for entry in tmp_path.glob("*cifar*")] == [path.name]


def test_a_crash_leaves_no_folder_under_the_final_name(small, python_folder: Path, tmp_path: Path, monkeypatch):
    path = pack(python_folder, tmp_path / "cifar-10-python.tar.gz")
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        archive.unpack(path, known_archive(path))
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.glob("*cifar*")] == [path.name]


def test_published_constants():
    """As published on the page of the data set, and as several projects pin them."""
    assert archive.PYTHON.md5 == "c58f30108f718f92721af3b95e74349a"
    assert archive.BINARY.md5 == "c32a1d4ab5d03f1284b67883e8d87530"
    assert archive.PYTHON.num_bytes == 170_498_071
    assert archive.BINARY.num_bytes == 170_052_171
    assert {len(known.sha256) for known in archive.ARCHIVES} == {64}
