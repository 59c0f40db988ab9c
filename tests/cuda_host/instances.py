"""Every kernel that moeflow can launch, by source: what the compile test covers and what the host runs.

The fake CuPy refuses a launch that is not listed here, so that no kernel goes uncompiled by NVRTC.
"""

from __future__ import annotations

from itertools import product

DTYPES = ("float", "moeflow::bf16", "moeflow::fp16")
_BOOL = ("false", "true")


def widths(dtype: str) -> tuple[int, ...]:
    """Values of one access: 16 bytes down to one value."""
    return (4, 2, 1) if dtype == "float" else (8, 4, 2, 1)


def _name(kernel: str, *template) -> str:
    return f"moeflow::{kernel}<{', '.join(map(str, template))}>" if template else f"moeflow::{kernel}"


def _permute() -> list[str]:
    kernels = ("dispatch_rows", "combine_rows", "combine_rows_backward")
    return [
        _name(kernel, dtype, width, choices)
        for kernel, dtype, choices in product(kernels, DTYPES, (1, 2, 4, 8))
        for width in widths(dtype)
    ]


def _gate() -> list[str]:
    shapes = [(1, vectors) for vectors in (1, 2, 4, 8, 16)] + [(2, 1), (4, 1)]
    names = []
    for dtype in DTYPES:
        wide = [(4, 2), (4, 4)] if dtype == "float" else [(8, 1), (8, 2)]
        for shape in shapes + wide:
            names += [_name("gate_forward", dtype, *shape, score) for score in (0, 1, 2)]
            names += [_name("gate_backward", dtype, *shape, score) for score in (1, 2)]
    return names


def _plan() -> list[str]:
    return [
        _name("histogram"),
        _name("scan_tiles"),
        _name("keep_highest"),
        *(_name("count_choices", major) for major in _BOOL),
        *(_name("place_choices", major, limit) for major, limit in product(_BOOL, _BOOL)),
    ]


def _activation() -> list[str]:
    return [
        _name(f"activation_{way}", dtype, width, number, gated, weighted)
        for way, dtype, number, gated, weighted in product(("forward", "backward"), DTYPES, range(4), _BOOL, _BOOL)
        for width in widths(dtype)
        if not (gated == "true" and number == 3)
    ]


def _regroup() -> list[str]:
    return [_name("regroup_rows", size, inverse) for size, inverse in product((16, 8, 4, 2), _BOOL)]


INSTANCES: dict[str, list[str]] = {
    "permute": _permute(),
    "gate": _gate(),
    "plan": _plan(),
    "activation": _activation(),
    "regroup": _regroup(),
}
