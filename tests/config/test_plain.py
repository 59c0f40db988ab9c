"""Frozen files: what is saved is what is loaded, and damage is named."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.config import compose, load, save
from moeflow.config.build import flatten
from moeflow.config.keys import POLYMORPHIC, Key, iter_keys
from moeflow.errors import ConfigError
from moeflow.schema import RunConfig

BASE = compose(["+recipe=cifar_tutorial_moe"])
KEYS = [
    key
    for key in iter_keys({section: type(getattr(BASE, section)) for section in POLYMORPHIC})
    if key.name[-5:] != ".name"
]
TEXTS = st.one_of(
    st.text(max_size=20), st.sampled_from(["null", "1e-3", "yes", "0x1F", "0E0", "~", "a: b", "- x", "#", "=", "1_0"])
)


def values(key: Key) -> st.SearchStrategy:
    floats = st.floats(allow_nan=False, allow_infinity=False)
    kinds = {bool: st.booleans(), int: st.integers(-(2**70), 2**70), float: floats, str: TEXTS}
    kinds[list] = st.lists(kinds.get(key.field.element, floats), max_size=3)
    return st.none() | kinds[key.field.kind] if key.field.optional else kinds[key.field.kind]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    config = copy.deepcopy(BASE)
    for key in data.draw(st.lists(st.sampled_from(KEYS), max_size=8, unique_by=lambda key: key.name)):
        section, _, name = key.name.rpartition(".")
        setattr(getattr(config, section) if section else config, name, data.draw(values(key)))
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    save(config, path)
    again = load(path)
    assert again == config
    assert [type(value) for value in flatten(again).values()] == [type(value) for value in flatten(config).values()]
    # Any reader of YAML sees the same numbers, also those like 1e-05.
    assert yaml.safe_load(path.read_text())["optim"]["lr"] == config.optim.lr


def test_missing_keys_keep_their_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("gate: {name: switch}\noptim: {lr: 3e-4}\n")
    config = load(path)
    assert (config.gate.name, config.gate.jitter, config.optim.lr) == ("switch", 0.01, 3e-4)
    assert config.trainer == RunConfig().trainer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim: {lrr: 1}", "Did you mean 'optim.lr'"),
        ("gate: {name: swich}", "Did you mean 'switch'"),
        ("gate: {name: naive, jitter: 1}", "gate=switch"),
        ("optim: {lr: '3'}", "must be a number"),
        ("trainer: {max_steps: 3.0}", "whole number"),
        ("trainer: {max_steps: true}", "whole number"),
        ("trainer: {compile: 1}", "true or false"),
        ("optim: {betas: 3}", "list"),
        ("model: {name: [1]}", "model.name"),
        ("trainer:", "trainer"),
        ("- 1", "table of keys"),
        ("x", "table of keys"),
        ("", "empty"),
        ("a: &x [*x]", "a"),
        ("optim: {lr: 1}\noptim: {}", "stands twice"),
        ("{[1]: 2}", "config.yaml"),
        ("a: b: c", "line 1"),
        ("\x00", "YAML"),
        ("? {a: 1}\n: 2", "config.yaml"),
        ("x: !!python/name:os.system", "YAML"),
        ("x: 0o9999999999999999999_", "config.yaml"),
        ("run: {name: 2020-13-45}", "config.yaml"),
        ("run: {name: 2020-01-01}", "run.name"),
    ],
)
def test_damage_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "config.yaml" in str(caught.value)
    assert expected in str(caught.value)
    assert path.read_text() == text


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_a_failing_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    save(BASE, path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(compose([]), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]
