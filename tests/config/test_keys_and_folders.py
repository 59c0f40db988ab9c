"""The keys read off the schema, absolute paths, and where the data folders are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import moeflow
from moeflow.config import absolute_paths, compose, locate
from moeflow.config import folders as folders_module
from moeflow.config.keys import all_key_names, iter_keys, nearest_key
from moeflow.errors import ConfigError
from moeflow.schema import TextData
from tests.distributed import ROOT


def test_every_key_has_help_and_a_default_that_its_rules_allow() -> None:
    for key in iter_keys():
        assert key.field.help, key.name
    compose([])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optim.lrr", "optim.lr"),
        ("optm.lr", "optim.lr"),
        ("lr", "optim.lr"),
        ("trainer.lr", "optim.lr"),
        ("trainer.maxsteps", "trainer.max_steps"),
        ("max_step", "trainer.max_steps"),
        ("gate.topk", "gate.top_k"),
        ("model.num_expert", "model.num_experts"),
        ("zzzzzz", None),
        ("trainer.zzz", None),
    ],
)
def test_nearest_key(name: str, expected: str | None) -> None:
    assert nearest_key(name, all_key_names()) == expected


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = compose(["run.root=outputs/../runs", "data.root='~/data'"])
    result = absolute_paths(config)
    assert result.run.root == str(tmp_path / "runs")
    assert result.data.root == "/home/somebody/data"
    assert result.run.dir is None
    assert config.run.root == "outputs/../runs"
    # A path below another key's folder is made absolute only where that folder is not given.
    config.data = TextData(path="book.txt")
    assert absolute_paths(config).data.path == str(tmp_path / "book.txt")
    config.data.root = "texts"
    assert absolute_paths(config).data.path == "book.txt"


def test_located_in_a_checkout() -> None:
    assert locate("configs") == ROOT / "configs"
    assert locate("recipes") == ROOT / "recipes"
    with pytest.raises(ConfigError, match="'nonsense' is missing"):
        locate("nonsense")


@pytest.mark.parametrize("layout", ["wheel", "editable"])
def test_located_when_installed(layout: str, tmp_path: Path) -> None:
    """A copy of the package as a wheel lays it out, or beside folders that an import hook maps to `moeflow.configs`."""
    code = "from moeflow.config import locate; print(locate('configs'))"
    site = tmp_path / "site"
    site.mkdir()
    package = Path(moeflow.__file__).parent
    if layout == "wheel":
        import shutil

        shutil.copytree(package, site / "moeflow", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "configs", site / "moeflow" / "configs")
        expected = site / "moeflow" / "configs"
    else:
        (site / "moeflow").symlink_to(package)
        expected = ROOT / "configs"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(expected), done.stderr


def test_the_import_systems_answer_is_taken_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mapped = tmp_path / "elsewhere"
    mapped.mkdir()
    (mapped / "__init__.py").touch()
    monkeypatch.setattr(folders_module, "_mapped", lambda folder: [mapped])
    folders_module.locate.cache_clear()
    assert locate("configs") == ROOT / "configs"
    monkeypatch.setattr(moeflow, "__file__", str(tmp_path / "site" / "moeflow" / "__init__.py"))
    folders_module.locate.cache_clear()
    assert locate("configs") == mapped
    folders_module.locate.cache_clear()
