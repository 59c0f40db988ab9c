"""The share of choices that may leave a node makes both links busy equally long."""

import dataclasses

import pytest

from moeflow.plan.outgoing import outgoing_share
from moeflow.plan.profile import DEFAULTS, default_profile


@pytest.mark.parametrize("device", DEFAULTS)
@pytest.mark.parametrize("ranks_per_node", [2, 8])
def test_both_links_are_busy_equally_long(device, ranks_per_node):
    profile = default_profile(device)
    share = outgoing_share(profile, ranks_per_node, 4)
    assert 0 < share < 1
    tokens, row = 4096.0, 8192.0
    rank_bandwidth = profile.between.bytes_per_s / (ranks_per_node if profile.shared_nic else 1)
    out_s = share * tokens * row / rank_bandwidth
    inside_s = (1 - share) * tokens * row * (ranks_per_node - 1) / ranks_per_node / profile.inside.bytes_per_s
    assert out_s == pytest.approx(inside_s)


def test_nothing_to_limit():
    profile = default_profile("h100")
    assert outgoing_share(profile, 8, 1) is None
    assert outgoing_share(profile, 1, 8) is None


def test_a_slower_network_lets_less_out():
    profile = default_profile("h100")
    slow = dataclasses.replace(profile, between=dataclasses.replace(profile.between, bytes_per_s=1e9))
    assert outgoing_share(slow, 8, 2) < outgoing_share(profile, 8, 2)
