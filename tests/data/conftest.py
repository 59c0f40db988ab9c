"""A small CIFAR-10 in both published layouts, 20 images a file, and nothing else within reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from moeflow.data import cifar10
from tests.data.formats import PY_FILES, ROWS, Small, write_binary, write_python


@pytest.fixture(autouse=True)
def no_usual_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test finds data that happen to lie on the machine, or reaches the network."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MOEFLOW_DATA", raising=False)
    monkeypatch.setenv("MOEFLOW_CIFAR10_URL", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Small:
    """Contents of the six files by name; makes moeflow expect ROWS images a file."""
    monkeypatch.setattr(cifar10, "ROWS", ROWS)
    rng = np.random.default_rng(7)
    return {
        name: (rng.integers(0, 256, (ROWS, 3072), dtype=np.uint8), rng.integers(0, 10, ROWS).tolist())
        for name in PY_FILES
    }


@pytest.fixture
def python_folder(small: Small, tmp_path: Path) -> Path:
    return write_python(small, tmp_path / "py")


@pytest.fixture
def binary_folder(small: Small, tmp_path: Path) -> Path:
    return write_binary(small, tmp_path / "bin")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
