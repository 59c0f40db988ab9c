"""Mutated command lines, recipes and frozen files: a valid configuration or a ConfigError, never anything else."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from moeflow.config import amend, compose, load, validate
from moeflow.config.build import to_dict
from moeflow.config.keys import all_key_names
from moeflow.config.options import group_names, options
from moeflow.errors import ConfigError

ODD = [
    *(
        "",
        "null",
        "true",
        "-1",
        "0",
        "1e400",
        "nan",
        "abc",
        "[1,2]",
        "{a:1}",
        "???",
        "${x}",
        "'",
        '"',
        "\\",
        "a b",
        "=",
    ),
    *(
        "1.5",
        "99999999999999999999",
        "[[[",
        "range(1,3)",
        "a,b",
        "glob(*)",
        "\u00e9\u4e2d",
        "!!int 3",
        "~",
        "${now:%Y}",
    ),
    *("interval(0,1)", "choice(1,2)", "[${optim.lr}]", "sort(3,2)", "\n", "\x00", "%", "9" * 5000),
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1.5,
    "x",
    "",
    [],
    {},
    [1, [2]],
    {"a": {"b": 1}},
    10**30,
    float("inf"),
    "${x}",
    "???",
    "\u00e9",
]


def mutate_text(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text) + 1)
    kind = rng.randrange(4)
    if kind == 0:
        return text[:place] + rng.choice("=.+~@[]{},:'\"$ \\\t#&*!%\x01x1-") + text[place:]
    if kind == 1:
        return text[:place] + text[place + 1 :]
    if kind == 2:
        return text[:place] + text[place : place + 3] * 2 + text[place + 3 :]
    return text.swapcase() if rng.random() < 0.1 else text[place:] + text[:place]


def words(rng: random.Random) -> list[str]:
    keys, result = all_key_names(), []
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.3:
            group = rng.choice(group_names())
            word = f"{rng.choice(['', '+', '++', '~'])}{group}={rng.choice([*options(group), 'x'])}"
        else:
            word = f"{rng.choice(['', '', '', '+', '~'])}{rng.choice(keys)}={rng.choice(ODD)}"
        for _ in range(rng.randrange(3)):
            word = mutate_text(word, rng)
        result.append(word)
    return result


def survives(function: Any, *args: Any) -> bool:
    try:
        function(*args)
        return True
    except ConfigError as error:
        assert error.exit_code == 2
        assert str(error).strip()
        return False


@pytest.mark.parametrize("seed", range(10))
def test_command_lines(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.chdir(tmp_path)
    for _ in range(10):
        survives(compose, ["+recipe=cifar_moe", *words(rng)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(100, 105))
def test_overrides_of_a_frozen_configuration(seed: int) -> None:
    rng = random.Random(seed)
    frozen = compose(["+recipe=cifar_moe"])
    before = repr(frozen)
    for _ in range(15):
        survives(lambda: validate(amend(frozen, words(rng))))
    assert repr(frozen) == before


def mutate_tree(tree: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        node = tree
        while rng.random() < 0.7 and (
            tables := [value for value in node.values() if isinstance(value, dict) and value]
        ):
            node = rng.choice(tables)
        key = rng.choice(list(node))
        kind = rng.randrange(4)
        if kind == 0:
            node[mutate_text(str(key), rng)] = node.pop(key)
        elif kind == 1:
            node[key] = rng.choice(VALUES)
        elif kind == 2:
            del node[key]
        else:
            node[rng.choice(["foo", "", "defaults", 3, None, "a.b"])] = rng.choice(VALUES)
        if not tree:
            break
    return tree


def test_recipes(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    path = tmp_path / "recipe" / "mine.yaml"
    original = yaml.safe_load(options("recipe")["cifar_tutorial_moe"].path.read_text())
    outcomes = set()
    for seed in range(40):
        rng = random.Random(seed)
        text = yaml.safe_dump(mutate_tree(original, rng))
        path.write_text(mutate_text(text, rng) if rng.random() < 0.4 else text, encoding="utf-8")
        before = path.read_bytes()
        outcomes.add(survives(compose, ["+recipe=mine"], [tmp_path]))
        assert path.read_bytes() == before
    assert outcomes == {True, False}


def test_frozen_files(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    original = to_dict(compose(["+recipe=cifar_moe"]))
    outcomes = set()
    for seed in range(300):
        rng = random.Random(seed)
        text = yaml.safe_dump(mutate_tree(original, rng))
        path.write_text(mutate_text(text, rng) if rng.random() < 0.4 else text, encoding="utf-8")
        outcomes.add(survives(lambda: validate(load(path))))
    assert outcomes == {True, False}
