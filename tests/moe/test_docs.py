"""The guide to the gates names every gate and every option."""

from __future__ import annotations

import dataclasses
import re

import pytest

from moeflow.schema.gate import GATES, GateConfig
from tests.distributed import ROOT

GUIDE = (ROOT / "docs" / "gates.md").read_text()


def section(name: str) -> str:
    return re.split(r"^##+ ", GUIDE.split(f"\n### {name}\n", 1)[1], maxsplit=1, flags=re.M)[0]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(GateConfig) if f.name != "name"])
def test_every_common_option(field: str):
    assert f"`{field}`" in section("Options of every gate")


@pytest.mark.parametrize("name", GATES)
def test_every_gate_and_its_own_options(name: str):
    common = {f.name for f in dataclasses.fields(GateConfig)}
    inherited = {"aux_free": {"num_groups", "top_groups", "group_score_k"}}.get(name, set())
    for field in dataclasses.fields(GATES[name]):
        if field.name not in common | inherited:
            assert f"`{field.name}`" in section(name) or f"`{field.name}=" in section(name), field.name
    assert (ROOT / "configs" / "gate" / f"{name}.yaml").is_file()


@pytest.mark.parametrize("name", GATES)
def test_every_option_has_a_line_of_help(name: str):
    for field in dataclasses.fields(GATES[name]):
        assert 5 < len(field.metadata["help"]) < 200, field.name
