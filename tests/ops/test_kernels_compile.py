"""Every kernel compiles for every architecture, spills nothing, and moves 16 bytes at once where it can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="needs cupy-cuda12x, for its binding of NVRTC")
from cupy_backends.cuda.libs import nvrtc

from moeflow.ops._cupy import source_code
from tests.cuda_host import resources
from tests.cuda_host.instances import INSTANCES
from tests.cuda_host.resources import ARCHITECTURES, MAIN

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"


@pytest.fixture(autouse=True)
def _needs_nvrtc():
    try:
        version = nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"NVRTC cannot be loaded ({error}): pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12")
    if version < (12, 8):
        pytest.skip(f"NVRTC {version} does not know sm_120: pip install 'nvidia-cuda-nvrtc-cu12>=12.8'")


def check(architecture: int, source: str, names: list[str]) -> None:
    for name, taken in resources.usage(source, names, architecture).items():
        assert taken.frame_bytes == 0, f"{name} on sm_{architecture} keeps {taken.frame_bytes} bytes in local memory"
        # Two blocks of 256 threads on a processor, at the least.
        assert 0 < taken.registers <= 128
        assert taken.shared_bytes <= 8192


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sample_compiles(architecture):
    # Each architecture takes other variants; all sources are in every sample.
    turn = ARCHITECTURES.index(architecture)
    for source, names in INSTANCES.items():
        check(architecture, source, names[7 * turn % len(names) :: 96])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_variant_compiles(architecture):
    for source, names in INSTANCES.items():
        check(architecture, source, names)


@pytest.mark.parametrize(
    "architecture", [pytest.param(each, marks=[] if each == 90 else [pytest.mark.slow]) for each in ARCHITECTURES]
)
def test_the_table_in_the_documentation_is_that_of_the_sources(architecture):
    text = DOCUMENT.read_text()
    version = re.search(r"NVRTC ([\d.]+)\)", text)[1]
    if version != resources.nvrtc_version():
        pytest.skip(f"the table is of NVRTC {version}, and {resources.nvrtc_version()} is installed")
    for source, names in MAIN.items():
        for name, taken in resources.usage(source, names, architecture).items():
            row = re.search(rf"^\| `{re.escape(name.replace('moeflow::', ''))}` \|(.*)\|$", text, re.MULTILINE)
            assert row, f"docs/kernels.md has no row for {name}: python -m tests.cuda_host.resources"
            cells = [int(cell) for cell in row[1].split("|")]
            assert cells[ARCHITECTURES.index(architecture)] == taken.registers
            assert cells[-1] == taken.shared_bytes


@pytest.mark.parametrize("source", ["permute", "activation", "regroup"])
def test_wide_variants_move_sixteen_bytes_at_once(source):
    wide = [name for name in MAIN[source] if "bf16" in name or "<16" in name]
    for name in wide:
        assembly = resources.ptx(source, [name], 80)
        assert re.search(r"ld\.global(\.nc)?\.v4\.[bu]32", assembly), name
        assert re.search(r"st\.global\.v4\.[bu]32", assembly), name
        # Nothing of a row is moved in pieces.
        assert not re.search(r"[ls][dt]\.global(\.nc)?\.[bu](16|8)\b", assembly), name


def test_no_name_is_listed_twice():
    for source, names in INSTANCES.items():
        assert len(set(names)) == len(names)
        assert set(MAIN[source]) <= set(names)
        kernels = set(re.findall(r"__launch_bounds__\([^)]*\)\s+(\w+)\(", source_code(source)))
        assert kernels == {re.split("<", name.removeprefix("moeflow::"))[0] for name in names}
