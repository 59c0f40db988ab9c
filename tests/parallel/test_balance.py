"""Shadowed experts: a run with them follows the run of one process without, on every kind of layout."""

from __future__ import annotations

import json

import pytest

from moeflow.moe.gates.base import in_backward
from moeflow.parallel.balancer import Balancer
from moeflow.schema import BalanceConfig, PrecisionConfig
from tests.distributed import run_ranks
from tests.parallel import parity
from tests.parallel.gpt_run import train
from tests.parallel.parity import Case

ALL = list(range(parity.NUM_EXPERTS))


def shadows(*experts: int) -> dict:
    return {"balance": BalanceConfig(shadow=True, fixed_shadows=list(experts))}


CASES = [
    Case(2, {"ep": 2}, shadows(1)),
    Case(2, {"ep": 2}, shadows(*ALL)),
    Case(2, {"ep": 2}, {"grad_accum": 2, **shadows(0, 5)}),
    Case(4, {"ep": 4}, shadows(2, 3, 7)),
    Case(4, {"ep": 2}, shadows(1, 6)),  # edp 2
    Case(4, {"tp": 2, "ep": 2}, shadows(1, 6)),
    Case(4, {"pp": 2, "ep": 2}, shadows(1, 6)),
    Case(4, {"ep": 2, "etp": 2}, shadows(1, 6)),
    Case(2, {"ep": 2}, shadows()),
    Case(4, {"ep": 2, "etp": 2}, shadows(*ALL)),
]
# The others take part in the slow tests.
QUICK = 6


def _name(case: Case) -> str:
    layout = " ".join(f"{key}={size}" for key, size in case.parallel.items())
    return f"{layout} {case.more['balance'].fixed_shadows}{' accumulated' if 'grad_accum' in case.more else ''}"


@pytest.fixture(scope="module")
def alone():
    return parity.reference()


@pytest.fixture
def profile(tmp_path):
    """Coefficients with which a small layer's hot experts are worth a message."""
    link = {"latency_s": 0.0, "bytes_per_s": 1e6}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"inside": link, "between": link, "flops": {"fp32": 1e8, "bf16": 1e8}, "launch_s": 0}))
    return str(path)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if n >= QUICK else [], id=_name(case))
        for n, case in enumerate(CASES)
    ],
)
def test_fixed_shadows_follow_one_process(case, alone):
    found = parity.compare(case, alone)
    assert found.holds, found


def _chosen(profile, recomputed, dtype):
    """A run whose shadows the cost model chooses: losses, parameters, and the choices of both kinds of forward pass."""
    forward, again = [], []
    decide = Balancer.decide

    def recorded(self, counts):
        found = decide(self, counts)
        (again if in_backward() else forward).append(found)
        return found

    Balancer.decide = recorded
    model = {**parity.MODEL, "d_hidden": 96, "activation_checkpointing": recomputed}
    balance = BalanceConfig(shadow=profile is not None, profile=profile, margin=0.0)
    losses, _, whole = train({"ep": 2}, steps=10, model=model, precision=PrecisionConfig(dtype), balance=balance)
    return losses, whole, forward, again


@pytest.mark.distributed
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_chosen_shadows_and_recomputation(profile, dtype, tolerance):
    (alone, parameters, _, _), *_ = run_ranks(_chosen, 2, None, False, dtype, timeout=60, init=False)
    both = run_ranks(_chosen, 2, profile, True, dtype, timeout=60, init=False)
    for losses, whole, forward, again in both:
        assert losses == pytest.approx(alone, rel=tolerance)
        if dtype == "fp32":
            worst = max(
                (whole[name] - value).norm() / value.norm().clamp(min=1e-12) for name, value in parameters.items()
            )
            assert worst < tolerance
        # What is computed anew chooses as before: two layers, the last one first.
        assert len(forward) == len(again) == 20
        assert again == [choice for step in range(10) for choice in reversed(forward[2 * step : 2 * step + 2])]
    assert both[0][2] == both[1][2]
    assert any(both[0][2]) and len(set(both[0][2])) > 2, "the model's choices follow the counts"
