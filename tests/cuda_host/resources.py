"""Compile every kernel with NVRTC, which needs neither a GPU nor a driver, and tell what it takes of a processor.

`python -m tests.cuda_host.resources` prints the table that docs/kernels.md holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeflow.ops._cupy import OPTIONS, source_code
from tests.cuda_host import cubin
from tests.cuda_host.instances import INSTANCES

ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)
# From sm_90 on, the system takes this much shared memory of every block, and the cubin counts it.
RESERVED_SHARED = {90: 1024, 100: 1024, 120: 1024}
# One variant of each kernel, as a bf16 model with 64 experts and two choices launches it.
MAIN = {
    "gate": (
        "moeflow::gate_forward<moeflow::bf16, 2, 1, 1>",
        "moeflow::gate_forward<moeflow::bf16, 2, 1, 0>",
        "moeflow::gate_backward<moeflow::bf16, 2, 1, 1>",
    ),
    "plan": (
        "moeflow::histogram",
        "moeflow::count_choices<false>",
        "moeflow::scan_tiles",
        "moeflow::place_choices<false, false>",
        "moeflow::place_choices<true, true>",
        "moeflow::keep_highest",
    ),
    "permute": (
        "moeflow::dispatch_rows<moeflow::bf16, 8, 2>",
        "moeflow::dispatch_rows<moeflow::bf16, 8, 8>",
        "moeflow::combine_rows<moeflow::bf16, 8, 2>",
        "moeflow::combine_rows<moeflow::bf16, 8, 8>",
        "moeflow::combine_rows_backward<moeflow::bf16, 8, 2>",
        "moeflow::combine_rows_backward<moeflow::bf16, 8, 8>",
    ),
    "activation": (
        "moeflow::activation_forward<moeflow::bf16, 8, 1, true, false>",
        "moeflow::activation_backward<moeflow::bf16, 8, 1, true, false>",
        "moeflow::activation_backward<moeflow::bf16, 8, 1, true, true>",
        "moeflow::activation_backward<moeflow::bf16, 8, 3, false, false>",
    ),
    "regroup": ("moeflow::regroup_rows<16, false>",),
}


def nvrtc_version() -> str:
    """Version of the NVRTC that is found, "major.minor"."""
    from cupy_backends.cuda.libs import nvrtc

    return ".".join(map(str, nvrtc.getVersion()))


def _program(source: str, names: Sequence[str], options: Sequence[str]):
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(source_code(source), f"{source}.cu", [], [])
    for name in names:
        nvrtc.addNameExpression(program, name)
    try:
        nvrtc.compileProgram(program, [*options, *OPTIONS])
    except nvrtc.NVRTCError as error:
        raise AssertionError(f"{source}.cu, {options}: {nvrtc.getProgramLog(program)}") from error
    return program


def usage(source: str, names: Sequence[str], architecture: int) -> dict[str, cubin.Usage]:
    """What each of `names` takes on an architecture (90 for sm_90), by name expression.

    Raises:
        AssertionError: NVRTC refuses the source; the message is its log.
    """
    from cupy_backends.cuda.libs import nvrtc

    program = _program(source, names, [f"-arch=sm_{architecture}"])
    try:
        found = cubin.kernels(nvrtc.getCUBIN(program))
        taken = {name: found[nvrtc.getLoweredName(program, name)] for name in names}
    finally:
        nvrtc.destroyProgram(program)
    reserved = RESERVED_SHARED.get(architecture, 0)
    return {
        name: cubin.Usage(each.registers, each.frame_bytes, max(0, each.shared_bytes - reserved))
        for name, each in taken.items()
    }


def ptx(source: str, names: Sequence[str], architecture: int) -> str:
    """The assembly text of the kernels."""
    from cupy_backends.cuda.libs import nvrtc

    program = _program(source, names, [f"-arch=compute_{architecture}"])
    try:
        text = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return text.decode() if isinstance(text, bytes) else text


def table() -> str:
    """Markdown: registers of each kernel's main variant on every architecture, and the extremes of all variants."""
    lines = [
        f"| kernel (NVRTC {nvrtc_version()}) | " + " | ".join(f"sm_{a}" for a in ARCHITECTURES) + " | shared bytes |",
        "| --- |" + " ---: |" * (len(ARCHITECTURES) + 1),
    ]
    most = frames = variants = 0
    for source, names in INSTANCES.items():
        found = {a: usage(source, names, a) for a in ARCHITECTURES}
        variants += len(names)
        most = max([most, *(each.registers for one in found.values() for each in one.values())])
        frames = max([frames, *(each.frame_bytes for one in found.values() for each in one.values())])
        for name in MAIN[source]:
            numbers = [str(found[a][name].registers) for a in ARCHITECTURES]
            shared = max(found[a][name].shared_bytes for a in ARCHITECTURES)
            lines.append(f"| `{name.replace('moeflow::', '')}` | {' | '.join(numbers)} | {shared} |")
    lines.append("")
    lines.append(
        f"All {variants} variants on {len(ARCHITECTURES)} architectures: at most {most} registers, and "
        f"{frames} bytes of local memory (no spill)."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
