"""`moeflow recipes`: list, show, copy."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from moeflow.config.folders import locate
from moeflow.config.options import options

NAMES = list(options("recipe"))


def test_the_list_has_all_and_names_what_is_next(moeflow) -> None:
    code, out, _ = moeflow("recipes")
    assert code == 0
    assert all(f"  {name} " in out for name in NAMES)
    assert out.splitlines()[-1] == "next  moeflow recipes cifar_moe"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_shown_as_it_stands(moeflow, name: str) -> None:
    code, out, _ = moeflow("recipes", name)
    assert code == 0
    assert (Path(locate("recipes")) / f"{name}.yaml").read_text().rstrip() in out
    assert f"next     moeflow train +recipe={name}" in out


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_a_copy_is_the_same_run_by_the_command_that_is_printed(moeflow, tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = moeflow("recipes", name, "--copy", "mine")
    assert code == 0
    assert out.splitlines()[0] == f"copied {name} to mine/recipe/my_{name}.yaml"
    words = shlex.split(out.splitlines()[-1].removeprefix("next  moeflow train "))
    copy, original = moeflow("check", *words), moeflow("check", f"+recipe={name}")
    assert copy[0] == 0
    assert copy[1] == original[1].replace(f"recipe      {name}", f"recipe      my_{name}").replace(
        f"outputs/{name}/", f"outputs/my_{name}/"
    )
    # What its comments say starts the copy too.
    text = Path(f"mine/recipe/my_{name}.yaml").read_text()
    assert f"moeflow train --config-dir mine +recipe=my_{name}" in text
    assert f"+recipe={name}" not in text


def test_a_copy_overwrites_nothing_and_takes_another_name(moeflow, tmp_path: Path) -> None:
    target = str(tmp_path / "d i r")
    assert moeflow("recipes", "cifar_moe", "--copy", target)[0] == 0
    mine = tmp_path / "d i r" / "recipe" / "my_cifar_moe.yaml"
    mine.write_text("mine\n")
    assert "exists; nothing was written" in moeflow("recipes", "cifar_moe", "--copy", target)[2]
    assert mine.read_text() == "mine\n"
    assert moeflow("recipes", "cifar_moe", "--copy", target, "--as", "other")[0] == 0
    assert (mine.parent / "other.yaml").is_file()
    assert "'gpt_moe' already" in moeflow("recipes", "cifar_moe", "--copy", target, "--as", "gpt_moe")[2]
    assert "letters, digits" in moeflow("recipes", "cifar_moe", "--copy", target, "--as", "../x")[2]


def test_a_recipe_of_ones_own_is_shown(moeflow, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# My own.\ndefaults:\n  - cifar_moe\n  - _self_\n")
    code, out, _ = moeflow("recipes", "-cd", str(tmp_path), "mine")
    assert code == 0
    assert "# builds on cifar_moe" in out
    assert f"moeflow train --config-dir {tmp_path} +recipe=mine" in out


def test_mistakes(moeflow) -> None:
    assert "Did you mean 'cifar_moe'?" in moeflow("recipes", "cifar_mo")[2]
    assert "--copy needs the name" in moeflow("recipes", "--copy", "x")[2]
    assert "takes one name" in moeflow("recipes", "cifar_moe", "gpt_moe")[2]
    assert "--as names the copy" in moeflow("recipes", "cifar_moe", "--as", "x")[2]
