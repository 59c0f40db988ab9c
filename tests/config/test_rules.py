"""Layouts that divide: against a statement of the rules by counting, and every mend that is offered does mend."""

from __future__ import annotations

import itertools
import re

import pytest

from moeflow.config import amend, compose, validate
from moeflow.config.problems import Problem
from moeflow.config.rules import check_rules
from moeflow.errors import ConfigError
from moeflow.schema import RunConfig

SIZES = [
    {"launch.processes": world, "parallel.pp": pp, "parallel.tp": tp, "parallel.ep": ep, "parallel.etp": etp}
    for world, pp, tp, ep, etp in itertools.product((1, 2, 4, 6, 8), (1, 2, 3), (1, 2), (1, 2, 3, 4), (1, 2))
]


def configure(sizes: dict[str, int]) -> RunConfig:
    config = RunConfig()
    for key, value in sizes.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    return config


def fits(config: RunConfig) -> bool:
    """The rules of the design, by handing ranks and samples out one by one."""
    p, world = config.parallel, config.launch.processes
    stages = [[rank for rank in range(world) if rank % p.pp == stage] for stage in range(p.pp)]
    if len({len(stage) for stage in stages}) != 1:
        return False
    stage = len(stages[0])
    dense = [rank for rank in range(stage) if rank % p.tp == 0]
    if len(dense) * p.tp != stage:
        return False
    replicas = {rank // (p.ep * p.etp) for rank in range(stage)}
    if len(replicas) * p.ep * p.etp != stage:
        return False
    shares = [0] * (len(dense) * config.trainer.grad_accum)
    for sample in range(config.data.batch_size):
        shares[sample % len(shares)] += 1
    experts = [0] * p.ep
    for expert in range(config.model.num_experts):
        experts[expert % p.ep] += 1
    return len(set(shares)) == 1 and len(set(experts)) == 1


def test_agrees_with_counting() -> None:
    seen = set()
    for sizes, experts, batch in itertools.product(SIZES, (6, 8), (48, 50)):
        config = configure(sizes | {"model.num_experts": experts, "data.batch_size": batch})
        valid = not list(check_rules(config))
        assert valid == fits(config), sizes
        seen.add(valid)
    assert seen == {True, False}


COMPOSED = compose([])


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["launch.processes=4", "parallel.ep=3"], "parallel.ep"),
        (["launch.processes=6", "parallel.ep=4", "data.batch_size=96"], "parallel.ep"),
        (["launch.processes=3", "parallel.pp=2"], "launch.processes"),
        (["launch.processes=2", "parallel.tp=4"], "launch.processes"),
        (["launch.processes=2", "parallel.ep=2", "model.num_experts=9"], "model.num_experts"),
        (["launch.processes=3"], "data.batch_size"),
        (["trainer.grad_accum=7"], "data.batch_size"),
        (["gate.top_k=9"], "gate.top_k"),
        (["model.num_experts=0", "launch.processes=2", "parallel.ep=2"], "parallel.ep"),
        (["launch.processes=4", "parallel.etp=3"], "parallel.e"),
    ],
)
def test_each_mend_mends(words: list[str], key: str) -> None:
    config = amend(COMPOSED, words)
    problems = list(check_rules(config))
    assert key in problems[0].what
    for problem in problems:
        offered = re.findall(r"([a-z_]+\.[a-z_]+)=([\d|]+)", str(problem.mend))
        assert offered, problem
        for name, value in [(name, value) for name, values in offered for value in values.split("|") if value]:
            mended = amend(config, [f"{name}={value}"])
            # Another rule may stand in the way now, but not the one that was told.
            assert _rule(problem) not in map(_rule, check_rules(mended)), (problem, name, value)


def _rule(problem: Problem) -> str:
    return re.sub(r"\d+", "N", problem.what)[:45]


def test_the_launchers_world_counts() -> None:
    config = compose(["launch.processes=2", "parallel.ep=2"])
    validate(config, world=4)
    with pytest.raises(ConfigError, match="launcher started 3"):
        validate(amend(config, ["parallel.pp=2"]), world=3)


def test_huge_numbers_are_answered_at_once() -> None:
    with pytest.raises(ConfigError):
        compose([f"data.batch_size={10**17 + 1}", "launch.processes=4", "parallel.ep=3", f"model.num_experts={10**17}"])
