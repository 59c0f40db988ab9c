"""Mistakes at every level: one message that names the key or file, the nearest valid one, and the mend."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeflow.config import compose
from moeflow.errors import ConfigError


def message(*words: str, dirs: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(list(words), dirs)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert len(text) < 700
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optim.lrr=1", ["'optim.lrr'", "'optim.lr'", "mend: optim.lr=1"]),
        ("+optim.lrr=1", ["'optim.lrr'", "'optim.lr'"]),
        ("++optim.lrr=1", ["'optim.lrr'", "'optim.lr'"]),
        ("optm.lr=1", ["'optm.lr'", "'optim.lr'"]),
        ("lr=1", ["'lr'", "mend: optim.lr=1"]),
        ("batch_size=64", ["mend: data.batch_size=64"]),
        ("max_stesp=3", ["mend: trainer.max_steps=3"]),
        ("+trainer.foo=1", ["unknown key 'trainer.foo'"]),
        ("+foo.bar=1", ["unknown key 'foo.bar'"]),
        ("gate.jitter=1", ["gate=switch"]),
        ("optim.lr=abc", ["optim.lr=abc", "must be a number"]),
        ("optim.lr=nan", ["optim.lr=nan", "finite"]),
        ("optim.lr=1e999", ["finite"]),
        ("optim.lr=", ["must be a number"]),
        ("trainer.max_steps=1.5", ["trainer.max_steps=1.5", "whole number"]),
        ("trainer.max_steps=null", ["whole number"]),
        ("trainer.compile=perhaps", ["trainer.compile=perhaps", "true or false"]),
        ("trainer=null", ["trainer"]),
        ("trainer=5", ["trainer"]),
        ("trainer.max_steps.x=1", ["trainer.max_steps"]),
        ("optim.betas=[0.9]", ["2 elements"]),
        ("optim.betas=[0.9,1.0]", ["below 1"]),
        ("optim.betas=[0.9,b]", ["optim.betas"]),
        ("tracker.names=[wanbd]", ["Did you mean 'wandb'?"]),
        ("launch.device=gpu", ["auto, cpu, cuda"]),
        ("trainer.max_steps=0", ["at least 1", "mend: trainer.max_steps=1"]),
        ("schedule.min_ratio=2", ["between 0.0 and 1.0"]),
        ("run.dir=", ["run.dir is empty", "leave it out"]),
        ("run.root=''", ["run.root is empty"]),
        ("data.root=", ["data.root is empty", "mend: data.root=FOLDER"]),
        ("run.name=???", ["run.name"]),
        ("gate=swich", ["'swich'", "'switch'", "mend: gate=switch"]),
        ("gate=null", ["one of"]),
        ("gate=[switch]", ["one of"]),
        ("gate.name=switch", ["gate.name=switch", "gate=switch"]),
        ("+recipe=cifar_mo", ["'cifar_mo'", "'cifar_moe'", "mend: +recipe=cifar_moe"]),
        ("+recipe=zzz", ["cifar_moe", "--config-dir"]),
        ("+debug=tinny", ["'tiny'"]),
        ("cifar_moe", ["mend: +recipe=cifar_moe"]),
        ("switch", ["mend: gate=switch"]),
        ("my_recipe.yaml", ["--config-dir"]),
        ("optim.lr 3", ["'optim.lr 3'", "mend: optim.lr=VALUE"]),
        ("optim.lr=[1,", ["optim.lr", "quote"]),
        ("optim.lr=1 gate=switch", ["word of its own"]),
        ("=3", ["missing"]),
        ("", ["not an override"]),
        ("gate=naive,switch", ["sweep", "--multirun"]),
        ("optim.lr=range(1,3)", ["--multirun"]),
        ("+recipe=glob(*)", ["--multirun"]),
        ("~gate", ["'~gate'"]),
        ("~optim.lr", ["'~optim.lr'"]),
        ("gate@model=switch", ["without @model"]),
        ("hydra.run.dir=x", ["run.dir=DIR"]),
        ("run.name=${nowhere}", ["run.name", "nowhere"]),
        ("run.name=${run.name}", ["run.name"]),
        ("run.name=${oc.env:MOEFLOW_UNSET_VARIABLE}", ["MOEFLOW_UNSET_VARIABLE"]),
        ("resume=yes_please", ["auto"]),
    ],
)
def test_one_wrong_word(word: str, expected: list[str]) -> None:
    text = message("+recipe=cifar_moe", word) if not word.startswith("+recipe") else message(word)
    for part in expected:
        assert part in text, text


def test_everything_that_is_wrong_is_told_at_once() -> None:
    text = message("optim.lrr=1", "trainer.max_steps=abc", "launch.device=gpu", "data.batch_size=0", "gate=switch")
    assert text.startswith("4 problems")
    for key in ("optim.lrr", "trainer.max_steps", "launch.device", "data.batch_size"):
        assert key in text
    text = message("gate=swich", "optim.lrr=1", "optim.lr 3", "+recipe=nope")
    assert text.startswith("4 problems")


def recipe(tmp_path: Path, text: str, name: str = "mine") -> tuple[Path, ...]:
    (tmp_path / "recipe").mkdir(exist_ok=True)
    (tmp_path / "recipe" / f"{name}.yaml").write_text(text)
    return (tmp_path,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim: {lrr: 1}", ["mine.yaml", "'optim.lrr'", "'optim.lr'"]),
        ("optim: {lr: fast}", ["mine.yaml", "optim.lr=fast", "number"]),
        ("trainer: 5", ["mine.yaml", "trainer"]),
        ("foo: 1", ["mine.yaml", "'foo'"]),
        ("gate: {jitter: 0.1}", ["mine.yaml", "gate=switch"]),
        ("trainer: {max_steps: -3}", ["trainer.max_steps=-3", "at least 1"]),
        ("defaults:\n  - override /gate: swich", ["swich"]),
        ("defaults:\n  - override /gat: switch", ["'override /gat'", "'gate'"]),
        ("defaults:\n  - /gate: switch", ["override /gate"]),
        ("defaults:\n  - gate: switch", ["override /gate"]),
        ("defaults:\n  - cifar_mo", ["mine.yaml", "'cifar_mo'", "'cifar_moe'"]),
        ("defaults: switch", ["mine.yaml", "list"]),
        ("defaults:\n  - mine", ["circle", "mine -> mine"]),
        ("defaults:\n  - [a]", ["mine.yaml"]),
        ("optim: {lr: 1", ["mine.yaml, line ", "not valid YAML"]),
        ("a: 1\n\tb: 2", ["mine.yaml, line 2"]),
        ("optim: {lr: 1}\noptim: {lr: 2}", ["stands twice"]),
        ("- a\n- b", ["mine.yaml", "table of keys"]),
        ("optim: !!python/object:os.system {}", ["mine.yaml", "YAML"]),
        ("run: {name: '${nowhere}'}", ["nowhere"]),
    ],
)
def test_a_faulty_recipe(tmp_path: Path, text: str, expected: list[str]) -> None:
    told = message("+recipe=mine", dirs=recipe(tmp_path, text))
    for part in expected:
        assert part in told, told


def test_a_faulty_recipe_harms_no_other(tmp_path: Path) -> None:
    dirs = recipe(tmp_path, "optim: {lr: 1")
    assert compose(["+recipe=cifar_moe"], dirs).run.recipe == "cifar_moe"


def test_a_recipe_that_is_no_text(tmp_path: Path) -> None:
    dirs = recipe(tmp_path, "")
    (tmp_path / "recipe" / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in message("+recipe=mine", dirs=dirs)
    (tmp_path / "recipe" / "mine.yaml").unlink()
    (tmp_path / "recipe" / "mine.yaml").mkdir()
    assert "cannot be read" in message("+recipe=mine", dirs=dirs)


def test_an_empty_recipe_is_the_defaults(tmp_path: Path) -> None:
    config = compose(["+recipe=mine"], recipe(tmp_path, "# nothing yet\n"))
    config.run.recipe = None
    assert config == compose([])


def test_faulty_config_dirs(tmp_path: Path) -> None:
    assert "does not exist" in message("+recipe=mine", dirs=(tmp_path / "nowhere",))
    (tmp_path / "file").write_text("")
    assert "not a folder" in message("+recipe=mine", dirs=(tmp_path / "file",))
    (tmp_path / "recipe").mkdir()
    assert f"--config-dir {tmp_path}" in message("+recipe=mine", dirs=(tmp_path / "recipe",))
    (tmp_path / "recipe" / "cifar_moe.yaml").write_text("")
    assert "moeflow's own recipe" in message("+recipe=cifar_moe", dirs=(tmp_path,))


def test_a_faulty_option_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "optim").mkdir()
    path = tmp_path / "optim" / "mine.yaml"
    path.write_text("lrr: 1\n")
    text = message("optim=mine", dirs=(tmp_path,))
    assert "mine.yaml" in text
    assert "'optim.lr'" in text
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "tight.yaml").write_text("defaults:\n  - switch\n  - _self_\njiter: 1.0\n")
    path.write_text("lr: 1\n")
    text = message("gate=tight", dirs=(tmp_path,))
    assert "tight.yaml" in text
    assert "Did you mean 'gate.jitter'?" in text
    path.write_text("lr: [1\n")
    assert "mine.yaml, line" in message("optim=mine", dirs=(tmp_path,))
    path.write_text("- 1\n")
    assert "table of keys" in message("optim=mine", dirs=(tmp_path,))
    path.write_text("defaults:\n  - nowhere\n")
    assert "nowhere" in message("optim=mine", dirs=(tmp_path,))
