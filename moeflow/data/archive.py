"""The published archives: their checksums, and unpacking them so that no member can do harm."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from moeflow.data import cifar10
from moeflow.errors import DataError
from moeflow.logging import get_logger

log = get_logger(__name__)

# No member of the published archives is larger than 31 MB.
MAX_MEMBER_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Archive:
    """A published archive.

    Attributes:
        name: of the file.
        num_bytes: size of the file.
        md5: as published with the data set.
        sha256: of the same file, as several other projects pin it; md5 alone no longer proves where a file is from.
        layout: what lies inside.
    """

    name: str
    num_bytes: int
    md5: str
    sha256: str
    layout: cifar10.Layout


PYTHON = Archive(
    name="cifar-10-python.tar.gz",
    num_bytes=170_498_071,
    md5="c58f30108f718f92721af3b95e74349a",
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    layout=cifar10.PYTHON,
)
BINARY = Archive(
    name="cifar-10-binary.tar.gz",
    num_bytes=170_052_171,
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    layout=cifar10.BINARY,
)
ARCHIVES = (PYTHON, BINARY)


def mismatch(path: Path, archive: Archive) -> str | None:
    """Return what differs between the file and the published archive, or None when it is the same file.

    The size is compared first, so a cut-off download is named as such.
    """
    num_bytes = path.stat().st_size
    if num_bytes != archive.num_bytes:
        return f"it has {num_bytes:,} bytes, the published file has {archive.num_bytes:,}"
    md5, sha256 = hashlib.md5(usedforsecurity=False), hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            md5.update(chunk)
            sha256.update(chunk)
    if md5.hexdigest() != archive.md5:
        return f"its md5 is {md5.hexdigest()}, the published one is {archive.md5}"
    if sha256.hexdigest() != archive.sha256:
        return f"its sha256 is {sha256.hexdigest()}, the published one is {archive.sha256}"
    return None


def unpack(path: Path, archive: Archive) -> Path:
    """Unpack a checked archive beside itself, unless that was done before.

    The files are written into a temporary folder that takes its final name when all are there, so a crash leaves no
    half-unpacked folder under that name.  The caller holds the lock of the folder.

    Returns:
        The folder with the files of the layout.

    Raises:
        DataError: the checksum or a member is wrong (the archive is left as it is), or the folder cannot be written.
    """
    target = path.parent / archive.layout.folder
    if cifar10.layout_of(target) is not None:
        return target
    wrong = mismatch(path, archive)
    if wrong is not None:
        raise DataError(
            f"{path} is not the published archive: {wrong}",
            "move it away and download it anew, or name another folder by data.root=FOLDER",
        )
    log.info("unpacking %s", path)
    try:
        with _folder_aside(target) as aside:
            _write_members(path, archive, aside)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked: {error or 'it ends too early'}", "download it anew") from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be unpacked into {path.parent}: {error.strerror or error}",
            "make room there or make it writable, or unpack it elsewhere and pass data.root=FOLDER",
        ) from error
    return target


@contextmanager
def _folder_aside(target: Path) -> Iterator[Path]:
    """Give a new empty folder that becomes `target` when the block ends well, and goes away when it does not."""
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".tmp", dir=target.parent))
    try:
        yield aside
        aside.chmod(0o755)
        os.rename(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_members(path: Path, archive: Archive, folder: Path) -> None:
    """Write the archive's files into `folder`; anything but plain files in the one expected place is refused."""
    wanted = {*archive.layout.train, *archive.layout.test}
    with tarfile.open(path, "r:gz") as tar:
        for member in tar:
            place = PurePosixPath(member.name)
            if member.isdir() and place.parts == (archive.layout.folder,):
                continue
            if not member.isreg() or place.parts != (archive.layout.folder, place.name):
                raise DataError(f"{path} is not unpacked: its member {member.name[:80]!r} is not a plain file in place")
            if member.size > MAX_MEMBER_BYTES:
                raise DataError(f"{path} is not unpacked: its member {member.name[:80]!r} has {member.size:,} bytes")
            source = tar.extractfile(member)
            assert source is not None  # it is a regular file
            with source, open(folder / place.name, "xb") as out:
                _copy(source, out)
            wanted.discard(place.name)
    if wanted:
        raise DataError(f"{path} is not unpacked: {sorted(wanted)} are missing in it")


def _copy(source: IO[bytes], out: IO[bytes]) -> None:
    shutil.copyfileobj(source, out, _CHUNK_BYTES)
