from __future__ import annotations

import json

import pytest

from moeflow.errors import ConfigError
from moeflow.plan.profile import DEFAULTS, default_profile, load_profile, profile_from, save_profile


def test_a_profile_survives_its_file(tmp_path):
    path = tmp_path / "profile.json"
    save_profile(DEFAULTS["h100"], path)
    assert load_profile(path) == DEFAULTS["h100"]
    assert json.loads(path.read_text())["inside"]["latency_s"] == DEFAULTS["h100"].inside.latency_s


def test_a_file_overrides_the_defaults_of_its_device(tmp_path):
    path = tmp_path / "profile.yaml"
    # YAML 1.1 reads 1e9 as text; a user means a number.
    path.write_text("device: a100\nsource: measured\nflops: {bf16: 2e14}\nbetween: {bytes_per_s: 1e9}\n")
    profile = load_profile(path)
    assert profile.rate("bf16") == 2e14
    assert profile.rate("fp32") == DEFAULTS["a100"].rate("fp32")
    assert (profile.between.bytes_per_s, profile.between.latency_s) == (1e9, DEFAULTS["a100"].between.latency_s)
    assert profile.source == "measured"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "h101"}, "Did you mean 'h100'"),
        ({"flop": 1}, "Did you mean 'flops'"),
        ({"inside": {"latency": 1}}, "Did you mean 'latency_s'"),
        ({"inside": 3}, "must be a mapping"),
        ({"memory_bytes": 0}, "above 0"),
        ({"launch_s": -1}, "not below 0"),
        ({"overlap": "much"}, "must be a number"),
        ({"half_rows": True}, "must be a number"),
    ],
)
def test_mistakes_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        profile_from(values)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "none.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("a: [1\n")
    with pytest.raises(ConfigError, match="neither JSON nor YAML"):
        load_profile(path)


def test_a_dtype_without_a_rate():
    with pytest.raises(ConfigError, match="no FLOP/s for fp8"):
        default_profile("cpu").rate("fp8")
