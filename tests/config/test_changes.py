"""Differences, overrides of a frozen configuration, and what a resumed run may change."""

from __future__ import annotations

import fnmatch

import pytest

from moeflow.config import amend, compose
from moeflow.config.changes import FIXED, FREE, differences, effect, refused
from moeflow.config.keys import all_key_names
from moeflow.errors import ConfigError
from moeflow.schema import RunConfig, SwitchGateConfig

OLD = compose(["+recipe=cifar_moe"])


def changed(*words: str) -> list[str]:
    return [str(change) for change in differences(OLD, amend(OLD, words))]


def test_differences_name_keys_and_values() -> None:
    assert changed("optim.lr=3e-4", "optim.betas=[0.8,0.9]", "optim.clip_norm=null") == [
        f"optim.lr: {OLD.optim.lr} -> 0.0003",
        f"optim.betas: [{','.join(map(str, OLD.optim.betas))}] -> [0.8,0.9]",
        "optim.clip_norm: 1.0 -> null",
    ]
    assert "gate.jitter: (none) -> 0.01" in changed("gate=switch")


def test_amend_leaves_the_old_one_alone_and_takes_whole_options() -> None:
    before = repr(OLD)
    new = amend(OLD, ["gate=switch", "gate.jitter=0.5", "tracker=wandb", "trainer={log_every:7}"])
    assert repr(OLD) == before
    assert new.gate == SwitchGateConfig(jitter=0.5)
    assert new.tracker.names == ["wandb"]
    assert new.trainer.log_every == 7
    assert new.trainer.max_steps == OLD.trainer.max_steps
    # A layout that does not divide by itself is judged with the rest of the run, not alone.
    assert amend(OLD, ["parallel=ep2", "launch.processes=2"]).parallel.ep == 2


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optim.lrr=1", "'optim.lr'"),
        ("optim.lr=abc", "number"),
        ("+recipe=cifar_moe", "made from"),
        ("+debug=tiny", "made from"),
        ("gate=swich", "'switch'"),
        ("gate.jitter=1", "gate=switch"),
        ("run.name=${x}", "value itself"),
        ("optim.lr", "KEY=VALUE"),
        ("optim.lr=1,2", "sweep"),
    ],
)
def test_amend_names_what_is_wrong(word: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        amend(OLD, [word])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("word", "free"),
    [
        ("trainer.max_steps=9999", True),
        ("trainer.log_every=1", True),
        ("optim.lr=1", True),
        ("checkpoint.every=7", True),
        ("tracker=wandb", True),
        ("launch.threads=1", True),
        ("parallel.ep=2", True),
        ("gate.capacity_factor=2", True),
        ("gate.load_balance_coef=0.1", True),
        ("data.root=/elsewhere", True),
        ("model.num_experts=16", False),
        ("gate=switch", False),
        ("gate.top_k=1", False),
        ("gate.bias=true", False),
        ("data.batch_size=64", False),
        ("data.source=synthetic", True),
        ("data.train_samples=10", False),
        ("data.augment=false", False),
        ("run.seed=5", False),
        ("optim=sgd", False),
        ("trainer.grad_accum=2", False),
    ],
)
def test_what_a_resumed_run_may_change(word: str, free: bool) -> None:
    changes = differences(OLD, amend(OLD, [word]))
    assert changes
    problems = refused(changes)
    assert bool(problems) != free
    assert not refused(changes, force=True)
    if problems:
        assert "--force" in str(problems[0].mend)
        assert any(change.key in problems[0].what for change in changes)


def test_a_run_keeps_its_folder_and_recipe_even_by_force() -> None:
    for word in ("run.dir=/x", "run.root=/x", "run.recipe=other"):
        assert refused(differences(OLD, amend(OLD, [word])), force=True)


def test_the_table_names_keys_that_exist() -> None:
    keys = all_key_names()
    for pattern in FREE:
        assert fnmatch.filter(keys, pattern), pattern
    assert set(FIXED) <= set(keys)
    assert effect("model.num_experts") is None
    assert differences(RunConfig(), RunConfig()) == []
