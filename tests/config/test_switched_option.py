"""The rule of a switched option: what a recipe states under a group belongs to the option it chose there."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeflow.config import Composition, compose_run
from moeflow.schema import GShardGateConfig, NaiveGateConfig, SwitchGateConfig

BASE = """
defaults:
  - override /gate: gshard
  - _self_
gate:
  capacity_factor: 1.5
  random_second: false
optim:
  lr: 0.005
trainer:
  max_steps: 50
"""
CHILD = """
defaults:
  - base
  - override /gate: switch
  - _self_
gate:
  jitter: 0.25
"""


@pytest.fixture
def run(tmp_path: Path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "base.yaml").write_text(BASE)
    (tmp_path / "recipe" / "child.yaml").write_text(CHILD)

    def compose(*words: str) -> Composition:
        return compose_run(words, [tmp_path])

    return compose


def test_the_recipes_own_option_keeps_its_values(run) -> None:
    for words in (["+recipe=base"], ["+recipe=base", "gate=gshard"]):
        composition = run(*words)
        assert composition.config.gate == GShardGateConfig(capacity_factor=1.5, random_second=False)
        assert not composition.notices


def test_another_option_starts_from_its_own_defaults(run) -> None:
    composition = run("+recipe=base", "gate=switch")
    assert composition.config.gate == SwitchGateConfig()
    # Other sections are untouched, and the user is told what no longer applies.
    assert composition.config.optim.lr == 0.005
    assert composition.config.trainer.max_steps == 50
    (notice,) = composition.notices
    assert "gate.capacity_factor=1.5" in notice
    assert "gate.random_second=false" in notice
    assert "gate=switch" in notice


def test_the_command_line_still_counts(run) -> None:
    gate = run("+recipe=base", "gate.capacity_factor=3", "gate=switch").config.gate
    assert gate == SwitchGateConfig(capacity_factor=3.0)


def test_a_recipe_built_on_another_may_switch_too(run) -> None:
    assert run("+recipe=child").config.gate == SwitchGateConfig(jitter=0.25)
    # Back to what the inner recipe chose: its values apply again, the outer one's do not.
    gate = run("+recipe=child", "gate=gshard").config.gate
    assert gate == GShardGateConfig(capacity_factor=1.5, random_second=False)
    assert run("+recipe=child", "gate=naive").config.gate == NaiveGateConfig()
    composition = run("+recipe=child", "gate=switch")
    assert composition.config.gate == SwitchGateConfig(jitter=0.25)


def test_values_written_for_the_primary_default(run) -> None:
    """The recipe never named an optimizer: its learning rate was meant for the default one."""
    assert run("+recipe=base", "optim=sgd").config.optim.lr == 0.1
    assert run("+recipe=base", "optim=adamw").config.optim.lr == 0.005
