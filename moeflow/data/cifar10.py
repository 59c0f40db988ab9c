"""CIFAR-10 as it is published: six files of 10,000 images, as Python pickles or as plain records.

Both layouts give the same arrays.  Described at https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeflow.data.files import read_regular
from moeflow.data.safe_pickle import fresh_copy, load_arrays
from moeflow.errors import DataError

ROWS = 10_000
"""Images of one file."""

PIXELS = 3 * 32 * 32
NUM_CLASSES = 10

# Mean and deviation of each color over the training images, on the scale 0 to 1.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

U8 = NDArray[np.uint8]
Rows = tuple[U8, NDArray[np.int64]]


@dataclass(frozen=True)
class Layout:
    """One of the two published layouts.

    Attributes:
        folder: name of the folder in the archive.
        train, test: names of the files.
        read: gives (pixels uint8 [ROWS, 3072], labels int64 [ROWS]) of one file.
    """

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[Path], Rows]


def read_pickle(path: Path) -> Rows:
    """Read one file of the Python layout.

    Returns:
        Pixels uint8 [ROWS, 3072] (1,024 red, green, blue, each row by row) and labels int64 [ROWS].

    Raises:
        DataError: the file is missing, damaged or of another format.
    """
    fields = load_arrays(path)
    missing = {"data", "labels"} - fields.keys()
    if missing:
        raise _bad(path, f"the entries 'data' and 'labels' were expected, {sorted(missing)} is not there")
    pixels, given = fields["data"], fields["labels"]
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != (ROWS, PIXELS):
        raise _bad(path, f"'data' should be uint8 [{ROWS}, {PIXELS}], it is {_describe(pixels)}")
    # as objects: a damaged label may be larger than any integer of numpy
    whole = isinstance(given, list) and all(type(label) is int for label in given)
    labels = np.array(given, dtype=object) if whole else given
    if not isinstance(labels, np.ndarray) or labels.shape != (ROWS,):
        raise _bad(path, f"'labels' should be {ROWS} integers, it is {_describe(given)}")
    return pixels, _checked(path, labels)


def read_binary(path: Path) -> Rows:
    """Read one file of the binary layout: records of one label byte and 3,072 pixel bytes.

    Returns:
        As `read_pickle`.

    Raises:
        DataError: the file is missing, or of another size, or a label is out of range.
    """
    try:
        raw = read_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", fresh_copy(path.parent)) from error
    expected = ROWS * (PIXELS + 1)
    if len(raw) != expected:
        raise _bad(path, f"{expected:,} bytes were expected ({ROWS:,} records of {PIXELS + 1}), it has {len(raw):,}")
    records = np.frombuffer(raw, dtype=np.uint8).reshape(ROWS, PIXELS + 1)
    return records[:, 1:], _checked(path, records[:, 0])


PYTHON = Layout(
    folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test=("test_batch",),
    read=read_pickle,
)
BINARY = Layout(
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test=("test_batch.bin",),
    read=read_binary,
)
LAYOUTS = (PYTHON, BINARY)


def layout_of(folder: Path) -> Layout | None:
    """Return the layout whose files lie in `folder` itself, judged by the first one, or None."""
    for layout in LAYOUTS:
        if any(os.path.isfile(folder / name) for name in (layout.train[0], layout.test[0])):
            return layout
    return None


def read(folder: Path, *, train: bool, limit: int | None = None) -> Rows:
    """Read the training or the test images.

    Args:
        folder: holds the six files of one of the layouts.
        train: the 50,000 training images, or the 10,000 test images.
        limit: read only the first n.

    Returns:
        Images uint8 [N, 3, 32, 32] (red, green, blue) and labels int64 [N], 0 to 9, in the order of the files.

    Raises:
        DataError: a file is missing, damaged or of another format.
    """
    layout = layout_of(folder)
    if layout is None:
        raise DataError(
            f"{folder} holds no CIFAR-10 files ({PYTHON.train[0]} or {BINARY.train[0]})", fresh_copy(folder)
        )
    names = layout.train if train else layout.test
    num_rows = min(limit or len(names) * ROWS, len(names) * ROWS)
    pixels = np.empty((num_rows, PIXELS), dtype=np.uint8)
    labels = np.empty(num_rows, dtype=np.int64)
    for start, name in zip(range(0, num_rows, ROWS), names, strict=False):
        stop = min(start + ROWS, num_rows)
        file_pixels, file_labels = layout.read(folder / name)
        pixels[start:stop] = file_pixels[: stop - start]
        labels[start:stop] = file_labels[: stop - start]
    return pixels.reshape(-1, 3, 32, 32), labels


def _checked(path: Path, labels: NDArray[Any]) -> NDArray[np.int64]:
    """Return the labels as int64 after a look at their range."""
    outside = (labels < 0) | (labels >= NUM_CLASSES)
    if outside.any():
        row = int(outside.argmax())
        raise _bad(path, f"labels run from 0 to {NUM_CLASSES - 1}, image {row} has {str(labels[row])[:20]}")
    return labels.astype(np.int64)


def _bad(path: Path, rule: str) -> DataError:
    return DataError(f"{path} is damaged or not a CIFAR-10 file: {rule}", fresh_copy(path.parent))


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"
