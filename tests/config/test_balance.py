"""Rules of the balance section: what it needs, and what it does not go with."""

from __future__ import annotations

import pytest

from moeflow.config import compose
from moeflow.errors import ConfigError

FITTING = ["launch.processes=2", "parallel.ep=2", "model.num_experts=8", "data.batch_size=64"]


@pytest.mark.parametrize("balance", ["none", "shadow", "placement", "full"])
def test_options(balance: str) -> None:
    config = compose([*FITTING, f"balance={balance}"])
    assert config.balance.shadow == (balance in ("shadow", "full"))
    assert config.balance.placement == (balance in ("placement", "full"))
    assert config.balance.active == (balance != "none")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["balance=shadow", "parallel.ep=1"], "parallel.ep=1 has one rank alone"),
        (["balance=full", "gate=soft"], "gate=soft gives all experts equally many rows"),
        (["balance=placement", "gate=topology"], "gate=topology chooses experts by where they are"),
        (["balance.fixed_shadows=[1]"], "nothing is shadowed"),
        (["balance=shadow", "balance.fixed_shadows=[1,8]"], "8 is no expert"),
        (["balance=shadow", "balance.fixed_shadows=[-1]"], "at least 0"),
        (["balance=placement", "balance.interval=0"], "at least 1"),
        (["balance=placement", "balance.decay=1.0"], "below 1"),
        (["balance=shadwo"], "shadow"),
    ],
)
def test_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        compose([*FITTING, *words])
    assert caught.value.mend or "mend" in str(caught.value)


def test_what_a_mend_says_mends() -> None:
    compose([*FITTING, "balance=shadow", "gate=topology"])
    compose([*FITTING, "balance=shadow", "balance.fixed_shadows=[1,7]"])
    compose([*FITTING, "balance=none", "parallel.ep=1", "launch.processes=1"])
