"""A wheel and an sdist of this checkout, built once, and empty environments to put them in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed import ROOT

NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", "outputs", "data", "wandb", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


def run(command: list[str | Path], cwd: Path, **environment: str) -> str:
    """Run a command; a failure shows all that it said."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        command, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_source(target: Path) -> Path:
    """Copy the checkout, without what runs and tools left in it: builds must not leave their traces in it either."""
    target.mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name in NOT_SOURCE(str(ROOT), [path.name]):
            continue
        if path.is_dir():
            # `data` is left out at the root alone: it is also a part of the package.
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
            shutil.copytree(path, target / path.name, ignore=ignore)
        else:
            shutil.copy2(path, target / path.name)
    return target


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_source(folder / "source")
    run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)], folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    source = copy_source(folder / "source")
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    run([sys.executable, "-c", build], source)
    (built,) = folder.glob("*.tar.gz")
    return built


@pytest.fixture
def empty_environment(tmp_path: Path) -> Callable[..., Path]:
    """Function that makes an environment, installs into it without dependencies, and returns its folder of programs.

    What moeflow depends on comes from the environment that runs the tests, by a .pth file: installing torch again
    would take minutes and show nothing.  moeflow itself cannot come that way, since the path files of the other
    environment (an editable install is one) are not read.
    """

    def make(*install: str) -> Path:
        folder = tmp_path / "environment"
        run([sys.executable, "-m", "venv", "--without-pip", str(folder)], tmp_path)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(
            [*PIP, "--python", str(folder / "bin/python"), "install", "--no-deps", "--no-build-isolation", *install],
            tmp_path,
        )
        return folder / "bin"

    return make
