"""Both published layouts, and what happens when their files are not what they should be."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moeflow.data import cifar10
from moeflow.errors import DataError
from tests.data.formats import PY_FILES, ROWS, binary_records, python2_pickle, python3_pickle, write_python


def old_numpy(pixels: np.ndarray, labels: list[int]) -> bytes:
    """Protocol 2 writes module names as plain lines, so that numpy 1's can be put in."""
    return python3_pickle(pixels, labels, protocol=2).replace(b"numpy._core", b"numpy.core")


def fortran(pixels: np.ndarray, labels: list[int]) -> bytes:
    return python3_pickle(np.asfortranarray(pixels), labels)


def array_labels(pixels: np.ndarray, labels: list[int]) -> bytes:
    return pickle.dumps({"data": pixels, "labels": np.array(labels, dtype=">i4")}, protocol=4)


ENCODERS: dict[str, Callable[..., bytes]] = {
    "python2": python2_pickle,
    "old_numpy": old_numpy,
    "fortran": fortran,
    "array_labels": array_labels,
    "text_keys": lambda pixels, labels: python3_pickle(pixels, labels, keys=str),
    **{f"protocol{n}": lambda pixels, labels, n=n: python3_pickle(pixels, labels, n) for n in range(6)},
}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("train", [True, False])
def test_layouts_give_identical_arrays(small, tmp_path: Path, binary_folder: Path, name: str, train: bool):
    folder = write_python(small, tmp_path / name, ENCODERS[name])
    files = PY_FILES[:5] if train else PY_FILES[5:]
    expected_pixels = np.concatenate([small[file][0] for file in files]).reshape(-1, 3, 32, 32)
    expected_labels = np.concatenate([small[file][1] for file in files])
    for source in (folder, binary_folder):
        images, labels = cifar10.read(source, train=train)
        assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
        np.testing.assert_array_equal(images, expected_pixels)
        np.testing.assert_array_equal(labels, expected_labels)


def test_the_hand_written_python2_bytes_are_what_pickle_reads(small):
    """The fixture is right: the standard library reads it, with numpy's own functions."""
    pixels, labels = small["test_batch"]
    loaded = pickle.loads(python2_pickle(pixels, labels), encoding="bytes")
    np.testing.assert_array_equal(loaded[b"data"], pixels)
    assert loaded[b"labels"] == labels


@pytest.mark.parametrize("limit", [1, ROWS - 1, ROWS, ROWS + 1, 5 * ROWS, 10 * ROWS])
def test_limit_reads_the_first_images_only(small, python_folder: Path, limit: int):
    whole, whole_labels = cifar10.read(python_folder, train=True)
    for name in PY_FILES[-(-limit // ROWS) : 5]:
        (python_folder / name).write_bytes(b"not even looked at")
    images, labels = cifar10.read(python_folder, train=True, limit=limit)
    np.testing.assert_array_equal(images, whole[:limit])
    np.testing.assert_array_equal(labels, whole_labels[:limit])


class Evil:
    """Runs a command when it is unpickled by pickle itself."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_runs_code_is_refused_and_named(python_folder: Path, tmp_path: Path):
    touched = tmp_path / "touched"
    (python_folder / "data_batch_2").write_bytes(pickle.dumps({"data": Evil(touched), "labels": []}))
    with pytest.raises(DataError, match=r"data_batch_2 is not a pickle of images: it names posix\.system"):
        cifar10.read(python_folder, train=True)
    assert not touched.exists()


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"c__builtin__\neval\n(S'1'\ntR.", "__builtin__.eval"),
        (b"cnumpy\nload\n(S'x'\ntR.", "numpy.load"),
        (b"cnumpy.core.multiarray\nscalar\n.", "numpy.core.multiarray.scalar"),
        (b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93.", "builtins.getattr"),
        (b"(iposix\nsystem\n.", "posix.system"),
    ],
)
def test_any_other_global_is_refused_and_named(python_folder: Path, raw: bytes, named: str):
    (python_folder / "test_batch").write_bytes(raw)
    with pytest.raises(DataError, match=f"it names {named}, which"):
        cifar10.read(python_folder, train=False)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"hello",
        b"\x80\x04N.",  # None
        b"\x80\x04]\x94.",  # a list
        b"\x80\x02X\xff\xff\xff\x7f",  # a text of 2 GiB that is not there
        b"\x80\x04\x8e" + (2**60).to_bytes(8, "little"),  # bytes of an exabyte
        b"Pevil\n.",  # a persistent id
        b"\x82\x01.",  # an extension code
        b"cnumpy\nndarray\n}S'x'\nI1\nsb.",  # a state for an admitted class
        b"cnumpy.core.multiarray\n_reconstruct\n(NN}S'f'\nI1\nstb.",
        b"cnumpy\ndtype\n(S'O8'\nI0\nI1\ntR.",  # objects
        b"cnumpy\ndtype\n(S'V1'\nI0\nI1\ntR.",
        b"c_codecs\nencode\n(S'x'\nS'rot13'\ntR.",
        b"(" * 100_000,
        b"\x80\x04" + b"\x8f" * 10 + b".",
        pickle.dumps({1: 2}),
        pickle.dumps({(1, 2): 2}),
    ],
)
def test_other_content_is_a_data_error_that_names_the_file(python_folder: Path, raw: bytes):
    (python_folder / "test_batch").write_bytes(raw)
    with pytest.raises(DataError, match="test_batch") as caught:
        cifar10.read(python_folder, train=False)
    assert "data.root=FOLDER" in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"data": None}, "'data' should be uint8 .*, it is a NoneType"),
        ({"data": np.zeros((ROWS, 3072), np.int32)}, r"it is int32 \[20, 3072\]"),
        ({"data": np.zeros((ROWS, 3072), np.int8)}, "it is int8"),
        ({"data": np.zeros((ROWS - 1, 3072), np.uint8)}, r"it is uint8 \[19, 3072\]"),
        ({"data": np.zeros((ROWS, 3071), np.uint8)}, r"it is uint8 \[20, 3071\]"),
        ({"data": [[0] * 3072] * ROWS}, "it is a list of 20"),
        ({"labels": [0] * (ROWS - 1)}, "'labels' should be 20 integers, it is a list of 19"),
        ({"labels": [0.5] * ROWS}, "'labels' should be 20 integers"),
        ({"labels": [True] * ROWS}, "'labels' should be 20 integers"),
        ({"labels": [3, 10] + [0] * (ROWS - 2)}, "labels run from 0 to 9, image 1 has 10"),
        ({"labels": [-1] * ROWS}, "image 0 has -1"),
        ({"labels": [10**400] * ROWS}, "image 0 has 1000"),
        ({"labels": np.full(ROWS, 2**63, np.uint64)}, "image 0 has 9223372036854775808"),
        ({"labels": np.zeros((ROWS, 1), np.int64)}, r"it is int64 \[20, 1\]"),
    ],
)
def test_wrong_sizes_dtypes_and_labels(small, python_folder: Path, change: dict, rule: str):
    pixels, labels = small["test_batch"]
    (python_folder / "test_batch").write_bytes(pickle.dumps({"data": pixels, "labels": labels} | change))
    with pytest.raises(DataError, match=rule) as caught:
        cifar10.read(python_folder, train=False)
    assert str(python_folder / "test_batch") in str(caught.value)


def test_fine_labels_of_cifar100_are_named(small, python_folder: Path):
    pixels, labels = small["test_batch"]
    (python_folder / "test_batch").write_bytes(pickle.dumps({"data": pixels, "fine_labels": labels}))
    with pytest.raises(DataError, match=r"\['labels'\] is not there"):
        cifar10.read(python_folder, train=False)


def test_truncated_files(python_folder: Path, binary_folder: Path):
    for path in (python_folder / "data_batch_3", binary_folder / "data_batch_3.bin"):
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(DataError, match=f"{path}.* expected"):
            cifar10.read(path.parent, train=True)


def test_a_missing_file_and_a_missing_folder(python_folder: Path, binary_folder: Path, tmp_path: Path):
    for path in (python_folder / "data_batch_4", binary_folder / "data_batch_4.bin"):
        path.unlink()
        with pytest.raises(DataError, match=f"{path} cannot be read: No such file"):
            cifar10.read(path.parent, train=True)
    with pytest.raises(DataError, match="holds no CIFAR-10 files"):
        cifar10.read(tmp_path / "nowhere", train=True)


def test_what_is_no_file_is_not_waited_for(python_folder: Path, binary_folder: Path):
    for path, train in ((python_folder / "data_batch_4", True), (binary_folder / "test_batch.bin", False)):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(DataError, match=f"{path} cannot be read: it is a pipe or a device"):
            cifar10.read(path.parent, train=train)
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(DataError, match=r"cannot be read|holds no CIFAR-10"):
            cifar10.read(path.parent, train=train)


def test_a_label_out_of_range_in_the_binary_layout(binary_folder: Path):
    raw = bytearray((binary_folder / "test_batch.bin").read_bytes())
    raw[3073 * 4] = 10
    (binary_folder / "test_batch.bin").write_bytes(raw)
    with pytest.raises(DataError, match="image 4 has 10"):
        cifar10.read(binary_folder, train=False)


def corrupt(raw: bytes, rng: np.random.Generator, near_start: bool) -> bytes:
    """Change, insert, delete, cut or double a few bytes."""
    out = bytearray(raw)
    for _ in range(int(rng.integers(1, 4))):
        if not out:
            break
        place = int(rng.integers(0, min(len(out), 600) if near_start else len(out)))
        kind = rng.integers(0, 6)
        if kind <= 1:
            out[place] = int(rng.integers(0, 256))
        elif kind == 2:
            out[place:place] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 3:
            del out[place : place + int(rng.integers(1, 9))]
        elif kind == 4:
            del out[place:]
        else:
            out[place:place] = out[place : place + int(rng.integers(1, 64))]
    return bytes(out)


@pytest.mark.parametrize("layout", ["python2", "protocol4", "protocol5", "binary"])
def test_two_hundred_corruptions(small, python_folder: Path, binary_folder: Path, layout: str):
    """Whatever happens to a file, it loads as well-formed images or is a DataError that names it."""
    rng = np.random.default_rng(11)
    pixels, labels = small["test_batch"]
    raw = binary_records(pixels, labels) if layout == "binary" else ENCODERS[layout](pixels, labels)
    path = binary_folder / "test_batch.bin" if layout == "binary" else python_folder / "test_batch"
    refused, loaded = 0, 200
    for number in range(200):
        path.write_bytes(corrupt(raw, rng, near_start=number % 2 == 0))
        try:
            images, classes = cifar10.read(path.parent, train=False)
        except DataError as error:
            refused += str(path) in str(error)
            loaded -= 1
            continue
        assert (images.shape, images.dtype) == ((ROWS, 3, 32, 32), np.uint8)
        assert (classes.shape, classes.dtype) == ((ROWS,), np.int64)
        assert 0 <= classes.min() <= classes.max() <= 9
    assert refused + loaded == 200  # each error named the file
    assert refused > 60  # most corruptions matter, so the loop above was not idle
