"""Phases of a profile: means over ranks, what a micro-batch of the MoE layers took, and profiles of another form."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeflow.report.curves import predicted_pictures
from moeflow.report.phases import measured_layers, phases_of
from moeflow.report.reading import RunData, Series
from moeflow.schema import RunConfig
from tests.report.synthetic import series_of

RANKS = [
    {"forward_s": {"experts": 0.1, "gate": 0.02, "optimizer": 0.5}, "backward_s": {"experts": 0.3}},
    {"forward_s": {"experts": 0.3, "all-to-all": 0.2}, "backward_s": {"combine": 0.4, "gate": 0.0}},
]


def run_with(profiles: list, predicted: Series | None = None, **parallel: int) -> RunData:
    config = RunConfig()
    config.trainer.grad_accum = 2
    for key, value in parallel.items():
        setattr(config.parallel, key, value)
    run = RunData(Path("run"), "A", config=config, profiles=profiles)
    if predicted is not None:
        run.series["balance/predicted_s"] = predicted
    return run


def test_means_over_the_ranks():
    found = {name: (forward, backward) for name, forward, backward in phases_of({"ranks": RANKS})}
    assert found["experts"] == pytest.approx((0.2, 0.15))
    assert found["all-to-all"] == pytest.approx((0.1, 0.0))
    assert found["combine"] == pytest.approx((0.0, 0.2))


@pytest.mark.parametrize("content", [{}, {"ranks": []}, {"ranks": [{}]}, {"ranks": 3}, {"ranks": [{"forward_s": "x"}]}])
def test_profiles_of_another_form_are_passed_over(content):
    assert phases_of(content) == []


@pytest.mark.parametrize(("parallel", "parts"), [({}, 2), ({"pp": 4}, 8), ({"pp": 2, "pp_microbatches": 6}, 12)])
def test_the_layers_of_one_micro_batch(parallel, parts):
    found = measured_layers(run_with([{"step": 7, "ranks": RANKS}], **parallel))
    assert found.steps.tolist() == [7]
    # experts, all-to-all and combine of both ranks; the gate and the optimizer are not what is predicted.
    assert found.values[0] == pytest.approx((0.1 + 0.3 + 0.3 + 0.2 + 0.4) / 2 / parts)


def test_predicted_stands_beside_measured():
    predicted = series_of({6: 0.3, 7: 0.26, 8: 0.3})
    (picture,) = predicted_pictures([run_with([{"step": 7, "ranks": RANKS}], predicted)])
    assert picture.title == "Predicted and measured time of the MoE layers"
    assert "beside what was measured" in picture.caption
    # Measured: 1.3 / 2 ranks / 2 micro-batches = 0.325; 0.26 is 20% below.
    assert "within 20%" in picture.caption
    (alone,) = predicted_pictures([run_with([], predicted)])
    assert "nothing was measured" in alone.caption
