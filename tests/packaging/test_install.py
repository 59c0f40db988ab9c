"""The wheel and the sdist hold all of moeflow, and an installed moeflow runs from any folder."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.distributed import ROOT
from tests.packaging.conftest import PIP, copy_source, run


def expected_files() -> set[str]:
    """Every file that must be installed, by its path in the wheel."""
    found = {path.relative_to(ROOT) for path in (ROOT / "moeflow").rglob("*.py")} | {Path("moeflow/py.typed")}
    found |= {path.relative_to(ROOT) for kind in ("*.css", "*.js") for path in (ROOT / "moeflow").rglob(kind)}
    data = {"configs": ["*.yaml"], "recipes": ["*.yaml"], "kernels": ["*.cu", "*.cuh"]}
    for folder, patterns in data.items():
        paths = [path for pattern in ["__init__.py", *patterns] for path in (ROOT / folder).rglob(pattern)]
        assert len(paths) > 1, f"nothing in {folder}/"
        found |= {Path("moeflow", path.relative_to(ROOT)) for path in paths}
    return {str(path) for path in found}


def test_the_wheel_holds_all_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected_files()
    assert wheel.name.endswith("py3-none-any.whl")


def test_the_metadata_say_what_is_needed(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
    text = archive.read(name).decode()
    lines = text.splitlines()
    assert "Requires-Python: >=3.10" in lines
    assert "Requires-Dist: torch>=2.9" in lines
    extras = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra")}
    assert extras >= {"deepspeed", "cuda12", "cuda13", "wandb", "hf", "dev", "all"}
    (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "moeflow = moeflow.cli.main:main" in archive.read(entry).decode()
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_a_wheel_built_from_the_sdist_is_the_same(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as tar:
        tar.extractall(tmp_path, filter="data") if hasattr(tarfile, "data_filter") else tar.extractall(tmp_path)
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)], tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_an_installed_wheel_runs_from_any_folder(wheel, empty_environment, tmp_path):
    programs = empty_environment(str(wheel))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    where = run([programs / "python", "-c", "import moeflow; print(moeflow.__file__)"], elsewhere).strip()
    assert Path(where).is_relative_to(programs.parent), "another moeflow was imported"
    assert "cifar_moe" in run([programs / "moeflow", "recipes"], elsewhere)
    said = run([programs / "moeflow", "check", "+recipe=cifar_moe", "gate=switch", "model.num_experts=4"], elsewhere)
    assert "gate switch" in said
    assert "nothing was started or written" in said
    kernels = "from moeflow.ops import _cupy; print(_cupy.source_folder())"
    assert Path(run([programs / "python", "-c", kernels], elsewhere).strip()).is_relative_to(programs.parent)
    assert list(elsewhere.iterdir()) == []


def test_an_installed_wheel_trains(wheel, empty_environment, tmp_path):
    programs = empty_environment(str(wheel))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = ["train", "+recipe=cifar_moe", "+debug=tiny", "trainer.max_steps=2", "data.source=synthetic"]
    run([programs / "moeflow", *words], elsewhere, OMP_NUM_THREADS="1")
    (summary,) = elsewhere.glob("outputs/cifar_moe/*/summary.json")
    assert summary.parent.joinpath("config.yaml").is_file()


def test_an_editable_install_follows_the_checkout(empty_environment, tmp_path):
    source = copy_source(tmp_path / "checkout")
    programs = empty_environment("-e", str(source))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert "cifar_moe" in run([programs / "moeflow", "recipes"], elsewhere)

    (source / "recipes/mine.yaml").write_bytes((source / "recipes/cifar_moe.yaml").read_bytes())
    assert "mine" in run([programs / "moeflow", "recipes"], elsewhere)
    assert "convnet" in run([programs / "moeflow", "check", "+recipe=mine"], elsewhere)


@pytest.mark.slow
@pytest.mark.parametrize("minor", ["3.10", "3.11", "3.12", "3.13"])
def test_other_pythons_take_the_wheel(minor, wheel, tmp_path):
    """What needs no torch runs: torch of another Python may not be at hand, so nothing else is installed."""
    wanted = tuple(map(int, minor.split(".")))
    known = [Path(f"/usr/bin/python{minor}"), *Path.home().glob(f".pyenv/versions/{minor}.*/bin/python{minor}")]
    python = (
        str(sys.executable) if sys.version_info[:2] == wanted else next((str(p) for p in known if p.exists()), None)
    )
    if python is None:
        pytest.skip(f"no Python {minor} here")
    run([python, "-m", "venv", "environment"], tmp_path)
    programs = tmp_path / "environment/bin"
    run([programs / "python", "-m", "pip", "-q", "install", "--no-deps", str(wheel)], tmp_path)
    run([programs / "python", "-W", "error", "-m", "compileall", "-q", "-f", "environment/lib"], tmp_path)
    assert "train" in run([programs / "moeflow", "--help"], tmp_path)
    run([programs / "python", "-c", "import moeflow.schema, moeflow.errors, moeflow.logging"], tmp_path)
    missing = subprocess.run(
        [programs / "moeflow", "check", "+recipe=cifar_moe"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert missing.returncode != 0
    assert "No module named" in missing.stderr
