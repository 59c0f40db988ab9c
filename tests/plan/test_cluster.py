from __future__ import annotations

import pytest

from moeflow.errors import ConfigError
from moeflow.plan.cluster import cluster_for, load_cluster
from moeflow.plan.profile import DEFAULTS, save_profile


def written(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_description(tmp_path):
    cluster = load_cluster(
        written(tmp_path, "nodes: 3\nranks_per_node: 4\ndevice: a100\nmemory_gib: 40\nreserve: 0.1\n")
    )
    assert (cluster.ranks, cluster.profile.device) == (12, "a100")
    assert cluster.usable_bytes == int(40 * 2**30 * 0.9)
    assert [cluster.near(size, stride) for size, stride in [(8, 1), (2, 1), (8, 2), (8, 16)]] == [4, 2, 2, 1]


def test_a_measured_profile_beside_it(tmp_path):
    save_profile(DEFAULTS["v100"], tmp_path / "mine.json")
    cluster = load_cluster(written(tmp_path, "nodes: 1\nprofile: mine.json\n"))
    assert cluster.profile == DEFAULTS["v100"]
    assert load_cluster(written(tmp_path, "device: h100\nprofile: {chunk_s: 1}\n")).profile.chunk_s == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node: 3", "Did you mean 'nodes'"),
        ("nodes: 0", "whole number above 0"),
        ("nodes: true", "whole number above 0"),
        ("reserve: 1", "from 0 to below 1"),
        ("profile: 3", "a file name or a mapping"),
        ("memory_gib: -1", "above 0"),
        ("- 1", "must be a mapping"),
    ],
)
def test_mistakes(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_cluster(written(tmp_path, text))


def test_ranks_fill_nodes():
    assert cluster_for("cpu", 4).ranks_per_node == 4
    with pytest.raises(ConfigError, match="do not fill nodes of 8"):
        cluster_for("cpu", 12)
