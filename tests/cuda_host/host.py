"""Compile CUDA sources with g++ and launch their kernels on the host."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
# The sanitizer's traps find misaligned 16-byte accesses and indices beyond local and shared arrays.
SANITIZE = (
    "-fsanitize=bounds,alignment,shift",
    "-fsanitize-undefined-trap-on-error",
    "-fno-sanitize-recover=all",
)
LIBRARY = ("-std=c++17", "-g1", "-fPIC", "-shared")
# Without -fno-gnu-unique, shared arrays of two libraries that hold the same template would be one.
FLAGS = (
    *LIBRARY,
    "-O1",
    "-w",
    "-fno-gnu-unique",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fwrapv",
    *SANITIZE,
)
RUNTIME_FLAGS = (*LIBRARY, "-O2", "-Wall")
FOOTER = """
#undef threadIdx
namespace {{
const cuda_host::Kernel kKernels[] = {{ {entries} }};
}}
extern "C" __attribute__((visibility("default"))) const cuda_host::Kernel* cuda_host_kernel(int index) {{
  return &kKernels[index];
}}
extern "C" __attribute__((visibility("default"))) void cuda_host_segment(void** begin, unsigned long* size) {{
  cuda_host_shared_segment(begin, size);
}}
"""


class HostError(AssertionError):
    """A kernel broke a rule on the host: the message says which, and where."""


class Kernel(ctypes.Structure):
    """Mirror of cuda_host::Kernel."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("invoke", ctypes.c_void_p),
        ("num_parameters", ctypes.c_int),
        ("size", ctypes.c_int * 48),
        ("kind", ctypes.c_char * 48),
    ]


def build_folder() -> Path:
    """Folder of compiled libraries, kept between runs and keyed by the sources."""
    folder = Path(
        os.environ.get("MOEFLOW_CUDA_HOST_CACHE") or Path(tempfile.gettempdir()) / f"moeflow-cuda-host-{os.getuid()}"
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _compile(source: str, stem: str, flags: Sequence[str]) -> Path:
    header = (HERE / "cuda_host.hpp").read_text()
    key = hashlib.sha256("\0".join([source, header, *flags]).encode()).hexdigest()[:20]
    library = build_folder() / f"{stem}-{key}.so"
    if not library.exists():
        # Several test processes may build the same library: each writes its own files, and the last rename wins.
        text, made = (
            library.with_suffix(f".{os.getpid()}.cpp"),
            library.with_suffix(f".{os.getpid()}.tmp"),
        )
        text.write_text(source)
        command = ["g++", *flags, f"-I{HERE}", str(text), "-o", str(made), "-lm"]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise HostError(f"g++ refused {stem}:\n{done.stderr[:6000]}")
        made.rename(library)
        text.unlink()
    return library


_runtime: ctypes.CDLL | None = None


def runtime() -> ctypes.CDLL:
    """The scheduler, loaded once with its symbols visible to the kernel libraries."""
    global _runtime
    if _runtime is None:
        library = _compile((HERE / "runtime.cpp").read_text(), "runtime", RUNTIME_FLAGS)
        _runtime = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return _runtime


class HostModule:
    """One compiled source.

    Args:
        code: CUDA C++ with its own headers already inlined.
        names: name expressions of the kernels wanted, such as "moeflow::combine_rows<float, 4, 2>".
        defines: options of the form -DNAME=VALUE.
        stem: file name used for the library.
    """

    def __init__(
        self,
        code: str,
        names: Sequence[str],
        defines: Sequence[str] = (),
        stem: str = "kernels",
    ):
        host = runtime()
        entries = ",\n".join(f'cuda_host::Describe<&{name}>::as("{name}")' for name in names)
        source = '#include "cuda_host.hpp"\n' + code + FOOTER.format(entries=entries)
        library = ctypes.CDLL(str(_compile(source, stem, [*FLAGS, *defines])), mode=ctypes.RTLD_LOCAL)
        library.cuda_host_kernel.restype = ctypes.POINTER(Kernel)
        self._launch = host.cuda_host_launch
        self._segment = ctypes.cast(library.cuda_host_segment, ctypes.c_void_p)
        self._library = library
        self.kernels = {name: library.cuda_host_kernel(i) for i, name in enumerate(names)}

    def launch(
        self,
        name: str,
        grid,
        block,
        arguments: Sequence,
        shared: int = 0,
        seed: int = 0,
    ) -> None:
        """Run a kernel over the whole grid.

        Args:
            arguments: a Python int for a pointer, a NumPy scalar of the very type of the parameter for the rest.
            shared: dynamic shared memory, in bytes.
            seed: order of blocks and threads, and the poison of shared memory; 0 is in order, 1 is backwards.

        Raises:
            HostError: the arguments do not fit the kernel's signature, or the kernel broke a rule.
        """
        kernel = self.kernels[name]
        slots, keep = _pack(name, kernel.contents, arguments)
        sizes = [(ctypes.c_uint * 3)(*[*map(int, each), 1, 1][:3]) for each in (grid, block)]
        error = ctypes.create_string_buffer(1000)
        status = self._launch(
            kernel,
            self._segment,
            *sizes,
            ctypes.c_uint(shared),
            ctypes.c_uint(seed),
            slots,
            error,
            ctypes.c_ulong(1000),
        )
        del keep
        if status:
            raise HostError(f"{name}: {error.value.decode()}")


def _pack(name: str, kernel: Kernel, arguments: Sequence):
    if len(arguments) != kernel.num_parameters:
        raise HostError(f"{name} takes {kernel.num_parameters} arguments and was given {len(arguments)}")
    keep, kinds = [], kernel.kind
    slots = (ctypes.c_void_p * max(1, len(arguments)))()
    for i, value in enumerate(arguments):
        # CuPy sends a Python int as 8 bytes and a NumPy scalar as it is.
        given = "p" if type(value) is int else np.dtype(type(value)).kind
        raw = np.asarray(value, dtype=np.int64 if given == "p" else None)
        want = chr(kinds[i]) if i < len(kinds) else "?"
        if given != want or raw.nbytes != kernel.size[i]:
            raise HostError(
                f"{name}: argument {i} is {type(value).__name__} ({given}, {raw.nbytes} bytes), "
                f"the kernel takes kind {want} of {kernel.size[i]} bytes"
            )
        keep.append(raw)
        slots[i] = raw.ctypes.data
    return slots, keep
