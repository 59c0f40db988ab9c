"""Reading pickles that hold arrays, without running what they name.

A pickle may name any importable function and have it called.  This reader admits the few names that an array needs,
and even those are stand-ins: no code of numpy sees the file's values before they were checked.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeflow.data.files import read_regular
from moeflow.errors import DataError

_INTEGERS = re.compile(r"[ui][1248]")
_ORDERS = {"=": "=", "<": "<", ">": ">", "|": "|"}


class _Admitted:
    """Base of the stand-ins.  A state for one that takes none is damage (and must never change the class)."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise DataError("unexpected object state")


class _ArrayType(_Admitted):
    """Stands in for the type numpy.ndarray, which a pickle names as an argument."""

    __slots__ = ()


class _Dtype(_Admitted):
    """Stands in for numpy.dtype: integers of 1 to 8 bytes."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *flags: Any):
        text = _text(code)
        if not _INTEGERS.fullmatch(text):
            raise DataError(f"array of dtype {text[:20]!r}, where integers were expected")
        self.code, self.order = text, "="

    def __setstate__(self, state: Any) -> None:
        self.order = _ORDERS[_text(state[1])]

    def numpy(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.code)


class _Array(_Admitted):
    """Stands in for the call that makes an empty array, filled by the state that follows."""

    __slots__ = ("value",)

    def __init__(self, array_type: Any, shape: Any, code: Any):
        self.value: NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran_order, raw = state
        self.value = _shaped(raw, dtype, shape, "F" if fortran_order else "C")


class _FromBuffer(_Array):
    """The same in the newest pickle protocol, which gives everything in one call."""

    __slots__ = ()

    def __init__(self, raw: Any, dtype: Any, shape: Any, order: Any):
        self.value = _shaped(raw, dtype, shape, _text(order))


class _Encode(_Admitted):
    """Stands in for codecs.encode: how Python 3 writes bytes in an old protocol."""

    __slots__ = ()

    def __new__(cls, text: Any, encoding: Any) -> Any:
        if _text(encoding) != "latin1":
            raise DataError("bytes in an unexpected encoding")
        return text.encode("latin1")


_ADMITTED: dict[tuple[str, str], type[_Admitted]] = {
    ("numpy", "ndarray"): _ArrayType,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy.core.numeric", "_frombuffer"): _FromBuffer,
    ("numpy._core.numeric", "_frombuffer"): _FromBuffer,
    ("_codecs", "encode"): _Encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Give the stand-in for a name, or refuse it.

        Raises:
            DataError: the name is not one of those an array needs.
        """
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise DataError(
                f"it names {module}.{name}, which no image file needs and which is not run",
                "this is not the published file; fetch a fresh copy from a source you trust",
            ) from None


def load_arrays(path: Path) -> dict[str, Any]:
    """Read a pickled dictionary of arrays, lists, numbers and texts.

    Args:
        path: file in any pickle protocol, written by Python 2 or 3 and any numpy.

    Returns:
        The dictionary with keys as text, and integer arrays as read-only numpy arrays.  Texts that Python 2 wrote come
        as bytes.

    Raises:
        DataError: the file is missing, damaged, names anything but the parts of an array, or is not a dictionary.
    """
    try:
        raw = read_regular(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}", fresh_copy(path.parent)) from error
    try:
        # "bytes": Python 2's texts stay the bytes they were; pixels are among them.
        loaded = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        return {_text(name): _plain(value) for name, value in loaded.items()}
    except DataError as error:
        raise DataError(
            f"{path} is not a pickle of images: {error.what}", error.mend or fresh_copy(path.parent)
        ) from error
    except Exception as error:  # damage can surface as nearly any exception, MemoryError among them
        raise DataError(
            f"{path} is damaged: a pickled dictionary of images was expected, reading its {len(raw):,} bytes gave "
            f"{type(error).__name__}: {str(error)[:80]}",
            fresh_copy(path.parent),
        ) from error


def fresh_copy(folder: Path) -> str:
    """What mends a damaged or missing file of an unpacked archive."""
    return f"unpack the published archive into {folder.parent} anew, or name another folder by data.root=FOLDER"


def _shaped(raw: Any, dtype: Any, shape: Any, order: str) -> NDArray[Any]:
    if not isinstance(dtype, _Dtype) or not isinstance(shape, tuple) or not isinstance(raw, (bytes, bytearray)):
        raise DataError("an array whose parts do not fit together")
    # reshape checks that the sizes agree, before anything is allocated
    array = np.frombuffer(raw, dtype=dtype.numpy()).reshape(shape, order="F" if order == "F" else "C")
    array.flags.writeable = False
    return array


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, _Array) else value


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin1")
    if isinstance(value, str):
        return value
    raise DataError(f"{type(value).__name__} where a text was expected")
