"""The shim itself: known answers of its intrinsics, and planted faults that it must catch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeflow.ops import _cupy, kernel_calls
from tests.cuda_host.fake_cupy import bits, host_engine, with_engine
from tests.cuda_host.host import HERE, HostError, HostModule
from tests.cuda_host.memory import Arena

SOURCE = (_cupy.source_folder() / "platform.cuh").read_text() + (HERE / "cases.cu").read_text().replace(
    '#include "platform.cuh"', ""
)
NAMES = [
    *(f"moeflow::{kernel}<{flag}>" for kernel in ("block_sum", "rotate_twice") for flag in ("false", "true")),
    *(f"moeflow::copy_rows<{fault}>" for fault in range(4)),
    "moeflow::intrinsics",
    *(f"moeflow::broken<{fault}>" for fault in range(1, 6)),
    *(f"moeflow::{kernel}<moeflow::{dtype}>" for kernel in ("convert", "round") for dtype in ("bf16", "fp16")),
]


@pytest.fixture(scope="module")
def cases() -> HostModule:
    return HostModule(SOURCE, NAMES, ["-DMOEFLOW_ARCH=700"], "cases")


def outcomes(cases, arena, name, grid, block, arguments, seeds=range(6), shared=0) -> set[bytes]:
    """Distinct states of all memory after one launch under several schedules."""
    before, found = arena.snapshot(), set()
    for seed in seeds:
        arena.restore(before)
        raw = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        cases.launch(f"moeflow::{name}", grid, block, raw, shared, seed)
        arena.check()
        found.add(b"".join(arena.snapshot()))
    return found


def test_block_sum_and_its_missing_barrier(cases):
    arena = Arena()
    values = arena.put(torch.randn(3, 256, generator=torch.Generator().manual_seed(0)))
    sums = arena.empty((3,), torch.float32)
    assert len(outcomes(cases, arena, "block_sum<false>", (3,), (256,), [values, sums])) == 1
    assert torch.allclose(sums, values.sum(1), rtol=1e-5)
    assert len(outcomes(cases, arena, "block_sum<true>", (3,), (256,), [values, sums])) > 1


def test_rotation_and_its_missing_second_barrier(cases):
    arena = Arena()
    values, out = (
        arena.put(torch.arange(64, dtype=torch.int32)),
        arena.empty((64,), torch.int32),
    )
    assert len(outcomes(cases, arena, "rotate_twice<false>", (1,), (64,), [values, out])) == 1
    assert torch.equal(out, values.roll(-2))
    assert len(outcomes(cases, arena, "rotate_twice<true>", (1,), (64,), [values, out])) > 1


def test_off_by_one_wrong_stride_and_misalignment(cases):
    for side in ("end", "start"):
        arena = Arena(side)
        source, out = (
            arena.put(torch.randn(1365, 3)),
            arena.empty((1365, 3), torch.float32),
        )
        grid, rows = (6,), np.int32(1365)
        outcomes(cases, arena, "copy_rows<0>", grid, (256,), [source, out, rows], seeds=(0,))
        assert torch.equal(source, out)
    arena = Arena("end")
    source, out = arena.put(torch.randn(1365, 3)), arena.empty((1365, 3), torch.float32)
    for fault, message in (
        (1, "outside of every buffer|bytes behind"),
        (2, "outside of every buffer"),
        (3, "misaligned"),
    ):
        with pytest.raises(HostError, match=message):
            outcomes(
                cases,
                arena,
                f"copy_rows<{fault}>",
                grid,
                (256,),
                [source, out, rows],
                seeds=(0,),
            )


def test_off_by_one_within_the_margin(cases):
    # The row too many lies in the page of the tensor, so that no guard page is touched.
    arena = Arena("start")
    source, out = arena.put(torch.randn(5, 3)), arena.empty((5, 3), torch.float32)
    with pytest.raises(HostError, match="bytes behind the tensor"):
        outcomes(
            cases,
            arena,
            "copy_rows<1>",
            (1,),
            (32,),
            [source, out, np.int32(5)],
            seeds=(0,),
        )


def test_intrinsics(cases):
    arena = Arena()
    values = torch.arange(64, dtype=torch.int32) * 7 % 31
    out = arena.empty((64, 16), torch.int32)
    assert (
        len(
            outcomes(
                cases,
                arena,
                "intrinsics",
                (1,),
                (64,),
                [arena.put(values), out],
                shared=4,
            )
        )
        == 1
    )
    odd, total = int((values % 2).sum()), int(values.sum())
    for warp in range(2):
        v = values[warp * 32 : warp * 32 + 32].tolist()
        for lane in range(32):
            half = lane ^ 1 if lane < 16 else lane ^ 2
            want = [
                v[5],
                v[lane ^ 3],
                v[lane - 2] if lane >= 2 else v[lane],
                v[lane + 4] if lane < 28 else v[lane],
                v[lane // 8 * 8 + 1],
                sum((v[i] % 2) << i for i in range(32)),
                int(7 in v),
                1,
                sum((v[i] % 3 == v[lane] % 3) << i for i in range(32)),
                sum(v),
                min(v),
                max(v),
                sum(v[:lane]),
                v[half],
                odd,
                total,
            ]
            assert out[warp * 32 + lane].tolist() == [((x + 2**31) % 2**32) - 2**31 for x in want]


@pytest.mark.parametrize(
    ("fault", "message"),
    [(1, "divergent barrier"), (2, "a lane ended|has ended"), (3, "array index")],
)
def test_broken_meetings_and_indices(cases, fault, message):
    arena = Arena()
    values, out = arena.put(torch.randn(256)), arena.empty((256,), torch.float32)
    with pytest.raises(HostError, match=message):
        outcomes(cases, arena, f"broken<{fault}>", (1,), (256,), [values, out])


@pytest.mark.parametrize("fault", [4, 5], ids=["float atomics", "uninitialized shared memory"])
def test_results_that_depend_on_chance(cases, fault):
    arena = Arena()
    values = arena.put(torch.randn(256, generator=torch.Generator().manual_seed(0)))
    out = arena.empty((256,), torch.float32)
    assert len(outcomes(cases, arena, f"broken<{fault}>", (1,), (256,), [values, out])) > 1


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_conversions_equal_those_of_torch(cases, name, dtype):
    arena = Arena()
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    wide, back = (
        arena.empty((65536,), torch.float32),
        arena.empty((65536,), torch.int16),
    )
    arguments = [arena.put(patterns), wide, back]
    outcomes(cases, arena, f"convert<moeflow::{name}>", (256,), (256,), arguments, seeds=(0,))
    want = patterns.view(dtype).float()
    number = ~want.isnan()
    assert torch.equal(bits(wide[number]), bits(want[number])) and wide[~number].isnan().all()
    assert torch.equal(back[number], patterns[number]) and back[~number].view(dtype).isnan().all()
    # Values between the representable ones, ties among them.
    between = torch.cat(
        [
            want[number],
            want[number] * 1.00390625,
            want[number] * 1.001,
            want[number] * 3e-3,
        ]
    )
    between = between[: len(between) // 256 * 256]
    rounded = arena.empty(between.shape, torch.int16)
    arguments = [arena.put(between), rounded]
    outcomes(
        cases,
        arena,
        f"round<moeflow::{name}>",
        (len(between) // 256,),
        (256,),
        arguments,
        seeds=(0,),
    )
    assert torch.equal(rounded, between.to(dtype).view(torch.int16))


# The same three kinds of fault, planted in a kernel of the project.
PLANTED = {
    "off by one": ("token < num_tokens; token +=", "token <= num_tokens; token +="),
    "missing barrier": (
        "      __syncthreads();\n      if (present",
        "      if (present",
    ),
    "wrong stride": (
        "rows_RD + row[k] * width + i",
        "rows_RD + row[k] * (width + 1) + i",
    ),
}


@pytest.mark.parametrize("fault", [None, *PLANTED])
def test_faults_planted_in_permute(fault, monkeypatch):
    def edit(code: str) -> str:
        if fault is None:
            return code
        assert PLANTED[fault][0] in code
        return code.replace(*PLANTED[fault])

    arena = Arena()
    with_engine(monkeypatch, arena, edit=edit)
    row_of = arena.put(torch.tensor([[2, 5], [0, -1], [4, 3], [1, 6]], dtype=torch.int32))
    slots = arena.put(torch.tensor([2, 6, 0, 5, 4, 1, 7], dtype=torch.int32))
    grad, rows = arena.put(torch.randn(4, 1024)), arena.put(torch.randn(7, 1024))
    weights = arena.put(torch.rand(4, 2))

    def both():
        y = kernel_calls.combine(rows, row_of, weights)
        grad_rows, grad_weights = kernel_calls.combine_backward(grad, rows, weights, row_of, slots)
        picked = torch.where((row_of < 0)[..., None], 0.0, rows[row_of.clamp(min=0).long()])
        assert torch.allclose(y, (weights[..., None] * picked).sum(1), rtol=1e-5, atol=1e-6), "wrong value"
        assert torch.allclose(grad_weights, (grad[:, None] * picked).sum(2), rtol=1e-4, atol=1e-4), "wrong value"
        assert grad_rows.isfinite().all(), "wrong value"

    if fault is None:
        both()
    else:
        with pytest.raises(
            AssertionError,
            match=r"another result|outside of every buffer|misaligned|wrong value",
        ):
            both()


def test_launch_code_is_held_to_the_signature():
    arena = Arena()
    run = host_engine(arena)
    x = arena.put(torch.randn(2, 8))
    row_of, y = (
        arena.put(torch.zeros(2, 1, dtype=torch.int32)),
        arena.empty((2, 8), torch.float32),
    )
    where = (x.device, "permute", "combine_rows", ("float", 4, 1), 1, (8, 32))
    good = (x, row_of, None, y, np.int64(2), np.int32(1), np.int64(8))
    run.launch(*where, good)
    for arguments, message in (
        (good[:-1], "takes 7 arguments"),
        ((*good[:4], np.int32(2), *good[5:]), "argument 4 is int32"),
        ((*good[:5], np.float32(1), good[6]), "argument 5 is float32"),
        ((torch.randn(2, 8), *good[1:]), "points at no guarded tensor"),
    ):
        with pytest.raises(HostError, match=message):
            run.launch(*where, arguments)
    with pytest.raises(HostError, match="invalid launch"):
        run.launch(*where[:-1], (64, 32), good)
