"""Writers of CIFAR-10's published layouts, byte by byte, for small files."""

from __future__ import annotations

import hashlib
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moeflow.data import cifar10
from moeflow.data.archive import Archive

ROWS = 20
PY_FILES = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]

Small = dict[str, tuple[np.ndarray, list[int]]]
"""Pixels uint8 [ROWS, 3072] and labels of each of the six files."""


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """The bytes that Python 2's cPickle wrote for the published files (protocol 2, texts as bytes)."""

    def text(value: bytes) -> bytes:  # SHORT_BINSTRING
        return b"U" + bytes([len(value)]) + value

    rows, columns = pixels.shape
    out = b"\x80\x02}q\x01("
    out += text(b"batch_label") + text(b"training batch 1 of 5")
    out += text(b"labels") + b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    out += text(b"data") + b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n"
    out += b"K\x00\x85" + text(b"b") + b"\x87R"
    out += b"(K\x01" + b"M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86"
    out += b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
    out += b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    raw = pixels.tobytes()
    out += b"\x89" + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"  # BINSTRING
    out += text(b"filenames") + b"](" + b"".join(text(b"img_%d.png" % i) for i in range(rows)) + b"e"
    return out + b"u."


def python3_pickle(pixels: np.ndarray, labels: list[int], protocol: int = 4, keys: type = bytes) -> bytes:
    """What Python 3 writes for the same content with this numpy."""
    fields = {"batch_label": "training batch", "labels": labels, "data": pixels, "filenames": ["a.png"] * len(labels)}
    return pickle.dumps({keys(k, "ascii") if keys is bytes else k: v for k, v in fields.items()}, protocol=protocol)


def binary_records(pixels: np.ndarray, labels: list[int]) -> bytes:
    return b"".join(bytes([label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True))


def write_python(small: Small, root: Path, encode: Callable[..., bytes] = python2_pickle) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, (pixels, labels) in small.items():
        (folder / name).write_bytes(encode(pixels, labels))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["x"] * 10}))
    return folder


def write_binary(small: Small, root: Path) -> Path:
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name, (pixels, labels) in small.items():
        (folder / f"{name}.bin").write_bytes(binary_records(pixels, labels))
    (folder / "batches.meta.txt").write_text("x\n" * 10)
    return folder


def pack(folder: Path, path: Path) -> Path:
    """Pack a folder as the published archives are."""
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        tar.add(folder, arcname=folder.name)
    return path


def known_archive(path: Path, **changes: str) -> Archive:
    """Take a file as it is now for the published one of its name; `changes` falsify a checksum."""
    raw = path.read_bytes()
    fields = {
        "name": path.name,
        "num_bytes": len(raw),
        "md5": hashlib.md5(raw).hexdigest(),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "layout": cifar10.BINARY if "binary" in path.name else cifar10.PYTHON,
    }
    return Archive(**{**fields, **changes})
