"""pyproject.toml, constraints.txt, Makefile and README agree, and the code needs no more than they say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.distributed import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTION = {"yaml": "pyyaml", "hydra": "hydra-core", "cupy_backends": "cupy", "google": "protobuf"}
STANDARD = set(sys.stdlib_module_names) | {"moeflow"}


def needs(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def third_party(path: Path, at_top: bool) -> set[str]:
    """Distributions that a file imports; only outside functions and TYPE_CHECKING where `at_top`."""
    tree = ast.parse(path.read_text())
    names = set()
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        if at_top and lazy:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).split(".")[0])
        todo.extend(ast.iter_child_nodes(node))
    return {canonicalize_name(DISTRIBUTION.get(name, name)) for name in names - STANDARD}


FILES = sorted((ROOT / "moeflow").rglob("*.py"))


def test_imports_at_the_top_of_a_module_are_dependencies():
    declared = needs(PROJECT["dependencies"])
    # Reached only on a GPU machine with CuPy, and by the trials of doctor.
    assert {(path.name, name) for path in FILES for name in third_party(path, True) - declared} == set()


def test_imports_inside_functions_are_dependencies_or_extras():
    declared = needs(PROJECT["dependencies"]) | {"cupy"}
    for extra in PROJECT["optional-dependencies"].values():
        declared |= needs(extra)
    assert {(path.name, name) for path in FILES for name in third_party(path, False) - declared} == set()


def test_no_dependency_is_there_for_nothing():
    used = set().union(*(third_party(path, False) for path in FILES))
    assert needs(PROJECT["dependencies"]) - used == set()


@pytest.fixture(scope="module")
def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned(pins: list[Requirement], python: str) -> dict[str, str]:
    """Package -> version that counts for a Python."""
    here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
    names = [canonicalize_name(pin.name) for pin in here]
    assert len(names) == len(set(names)), "two pins for one package"
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in here}


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_what_make_installs_is_pinned_within_the_accepted_ranges(pins, python):
    versions = pinned(pins, python)
    lines = list(PROJECT["dependencies"])
    for extra in ("deepspeed", "tensorboard", "wandb", "hf", "dev"):
        lines += PROJECT["optional-dependencies"][extra]
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if name != "moeflow":
            assert name in versions, f"{name} is not pinned: make lock"
            assert requirement.specifier.contains(versions[name]), f"{name}=={versions[name]} is outside {requirement}"
    assert versions["torch"] == "2.13.0"


def make(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    return subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), *words],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def standing(tmp_path) -> Path:
    """A folder whose environment is newer than what it is made from."""
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/ready").touch()
    return tmp_path


def test_train_starts_at_once_where_the_environment_stands(standing):
    run = make("-n", "train", "ARGS=gate=switch optim.lr=3e-4", cwd=standing)
    assert run.stdout.split() == [".venv/bin/moeflow", "train", "+recipe=cifar_moe", "gate=switch", "optim.lr=3e-4"]
    assert "+recipe=cifar_dense" in make("-n", "train", "RECIPE=cifar_dense", cwd=standing).stdout


@pytest.mark.parametrize("changed", ["pyproject.toml", "setup.py", "constraints.txt"])
def test_a_changed_requirement_sets_up_again(standing, changed):
    os.utime(standing / changed)
    os.utime(standing / ".venv/ready", (2, 2))
    said = make("-n", "train", cwd=standing).stdout
    assert re.search(r"pip .*install .*-c constraints.txt.* torch\n", said)
    assert said.index(" torch\n") < said.index("--no-build-isolation -e '.[dev]'")
    assert said.rstrip().endswith("train +recipe=cifar_moe")


def test_an_old_python_is_named_with_the_mend(tmp_path):
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        (tmp_path / name).touch()
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.10 && exit 0\nexit 1\n')
    old.chmod(0o755)
    run = make("train", f"PYTHON={old}", cwd=tmp_path)
    assert run.returncode != 0
    assert "moeflow needs Python 3.10 or newer" in run.stdout
    assert "Python 3.8.10" in run.stdout
    assert "mend: make train PYTHON=" in run.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_python_that_is_not_there_is_named(tmp_path):
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        (tmp_path / name).touch()
    run = make("test", "PYTHON=nopython", cwd=tmp_path)
    assert run.returncode != 0
    assert "'nopython'" in run.stdout
    assert "mend: make test PYTHON=" in run.stdout


def test_help_lists_every_target(tmp_path):
    said = make("help", cwd=tmp_path).stdout
    for target in ("setup", "train", "test", "test-all", "lint", "format", "types", "lock", "clean", "help"):
        assert re.search(rf"^  make {target} ", said, re.MULTILINE), target


def test_ci_runs_what_a_person_runs():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")][-1] == "exec make test"


def test_the_first_screen_of_the_readme_has_both_commands():
    screen = (ROOT / "README.md").read_text().splitlines()[:40]
    assert any(line.strip().startswith("make train") for line in screen)
    assert any(line.strip().startswith("make test") for line in screen)
