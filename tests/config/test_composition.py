"""Every recipe and option composes, from any folder, in the stated order, to what OmegaConf itself would make."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from moeflow.config import compose, compose_run
from moeflow.config.keys import POLYMORPHIC
from moeflow.config.options import EXTRA_GROUPS, default_choices, group_names, options
from moeflow.errors import ConfigError
from moeflow.schema import RunConfig, SwitchGateConfig

RECIPES = list(options("recipe"))
GROUPS = [group for group in group_names() if group != "recipe"]
# One command line takes an option of each group, so that as many as the largest group has see every option.
ROUNDS = max(len(options(group)) for group in GROUPS)


@pytest.fixture
def my_configs(tmp_path: Path) -> Path:
    """A user's folder with a recipe, one built on it, and a variant of a gate."""
    files = {
        "recipe/mine.yaml": "defaults:\n  - override /gate: gshard\n"
        "gate: {capacity_factor: 1.5}\ntrainer: {max_steps: 77}\n",
        "recipe/child.yaml": "defaults:\n  - mine\n  - override /optim: sgd\n  - _self_\ntrainer: {log_every: 5}\n",
        "gate/tight.yaml": "defaults:\n  - switch\n  - _self_\ncapacity_factor: 1.0\n",
    }
    for name, text in files.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "conf"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_with_every_option(recipe: str) -> None:
    for number in range(ROUNDS):
        chosen = {group: names[number % len(names)] for group in GROUPS if (names := list(options(group)))}
        if chosen["gate"] in ("soft", "topology"):
            chosen["balance"] = "none"  # they do not go with every one
        words = [f"{'+' if group in EXTRA_GROUPS else ''}{group}={name}" for group, name in chosen.items()]
        # Layouts need ranks, and experts and samples to share out among them.
        sizes = ["launch.processes=4", "model.num_experts=64", "data.batch_size=64", "trainer.grad_accum=1"]
        sizes += ["parallel.ep=2"]
        config = compose([f"+recipe={recipe}", *words, *sizes])
        assert config.run.recipe == recipe
        for section, classes in POLYMORPHIC.items():
            # A variant of another name is made of one of the classes too.
            expected = classes.get(chosen[section], classes[getattr(config, section).name])
            assert type(getattr(config, section)) is expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_alone(recipe: str) -> None:
    assert compose([f"+recipe={recipe}"]).run.recipe == recipe


def test_every_class_has_an_option_of_its_name_and_every_group_a_default() -> None:
    for section, classes in POLYMORPHIC.items():
        assert set(classes) <= set(options(section)), section
    for group, name in default_choices().items():
        assert name in options(group)
    assert {
        "model",
        "gate",
        "parallel",
        "balance",
        "data",
        "optim",
        "schedule",
        "precision",
        "tracker",
        "launch",
    } <= set(group_names())


@pytest.mark.parametrize("group", group_names())
def test_every_option_file_says_what_it_is(group: str) -> None:
    for option in options(group).values():
        assert len(option.summary) > 4, option.path
        assert option.summary.endswith("."), option.summary


@pytest.mark.parametrize("words", [["+recipe=cifar_moe"], ["+recipe=cifar_moe", "gate=switch", "gate.jitter=0.1"]])
def test_equals_omegaconfs_own_objects(words: list[str]) -> None:
    composition = compose_run(words)
    assert OmegaConf.to_object(composition.node) == composition.config
    assert isinstance(composition.config, RunConfig)


def test_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = compose(["+recipe=cifar_moe"])
    monkeypatch.chdir(tmp_path)
    assert compose(["+recipe=cifar_moe"]) == here
    assert not list(tmp_path.iterdir())


def test_values_reach_their_keys_with_their_types() -> None:
    config = compose(
        ["+recipe=cifar_moe", "optim.lr=3e-4", "trainer.max_steps=500", "optim.clip_norm=null", "run.name=123"]
    )
    assert (config.optim.lr, config.trainer.max_steps, config.optim.clip_norm) == (3e-4, 500, None)
    assert config.run.name == "123"
    assert compose(["optim.lr=1"]).optim.lr == 1.0
    assert isinstance(compose(["optim.lr=1"]).optim.lr, float)


def test_order_is_recipe_then_debug_then_command_line() -> None:
    for words in (["+recipe=cifar_moe", "+debug=tiny"], ["+debug=tiny", "+recipe=cifar_moe"]):
        config = compose(words)
        assert config.trainer.max_steps == 8
        assert config.data.source == "synthetic"
        assert compose([*words, "trainer.max_steps=3"]).trainer.max_steps == 3
    assert compose(["optim.lr=1", "optim.lr=2"]).optim.lr == 2
    assert compose(["gate=naive", "gate=switch"]).gate.name == "switch"


def test_plus_may_be_left_out_or_be_too_much() -> None:
    assert compose(["recipe=cifar_moe"]) == compose(["+recipe=cifar_moe"])
    assert compose(["+gate=switch"]) == compose(["gate=switch"])


def test_users_recipes_and_variants(my_configs: Path) -> None:
    config = compose(["+recipe=mine"], [my_configs])
    assert (config.gate.name, config.gate.capacity_factor, config.trainer.max_steps) == ("gshard", 1.5, 77)
    child = compose(["+recipe=child"], [my_configs])
    assert (child.gate.capacity_factor, child.optim.name, child.trainer.log_every) == (1.5, "sgd", 5)
    variant = compose(["+recipe=cifar_moe", "gate=tight"], [my_configs])
    assert isinstance(variant.gate, SwitchGateConfig)
    assert variant.gate.capacity_factor == 1.0
    # Nothing of the user's stays behind for the next composition.
    with pytest.raises(ConfigError, match="no recipe 'mine'"):
        compose(["+recipe=mine"])


def test_relative_config_dir(my_configs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(my_configs.parent)
    assert compose(["+recipe=mine"], ["conf"]).trainer.max_steps == 77


def test_inside_a_program_that_uses_hydra_itself(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("a: 1\n")
    ConfigStore.instance().store(group="optim", name="theirs", node={"b": 2})
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose(["+recipe=cifar_moe"]).run.recipe == "cifar_moe"
        assert GlobalHydra.instance().is_initialized()
        assert hydra_compose("app", ["+optim=theirs"]).optim.b == 2
    ConfigStore.instance().repo.pop("optim")


def test_a_launcher_fixes_the_number_of_processes() -> None:
    assert compose(["+recipe=cifar_moe", "parallel.ep=2"], world=2).parallel.ep == 2
    with pytest.raises(ConfigError, match="launcher started 3"):
        compose(["+recipe=cifar_moe", "parallel.pp=2"], world=3)


def test_environment_variables_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_ROOT", "/data/runs")
    assert compose(["run.root=${oc.env:MY_ROOT}"]).run.root == "/data/runs"


def test_defaults_of_the_dataclasses_are_those_of_the_composition() -> None:
    """The help text shows the dataclasses' defaults, so the default options must not say otherwise."""
    composed = compose([])
    for section in (field.name for field in dataclasses.fields(RunConfig)):
        value = getattr(composed, section)
        if dataclasses.is_dataclass(value):
            assert value == type(value)(), section
