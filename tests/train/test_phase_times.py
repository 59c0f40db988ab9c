"""Attribution of a profile's time, on ranges made by hand and on a profile of one layer."""

from __future__ import annotations

import contextlib

import pytest
import torch

from moeflow.moe import DenseMLP, MoELayer, SharedExperts
from moeflow.ops import phases
from moeflow.train.phase_times import OTHER, Range, add_up
from moeflow.train.profiling import ranges_of

NODE = "autograd::engine::evaluate_function: "


def step(start: float, end: float, thread: int = 0) -> Range:
    return Range("moeflow/step", start, end, thread)


def test_time_belongs_to_the_innermost_phase_and_sums_to_the_step():
    times = add_up(
        [
            step(0, 100e3),
            Range("moeflow/rest of the model", 0, 50e3),
            Range("moeflow/gate", 10e3, 20e3),
            Range("aten::mm", 12e3, 15e3),
            Range("moeflow/all-to-all", 20e3, 40e3),
            Range("moeflow/experts", 25e3, 33e3),
            Range("Optimizer.step#AdamW.step", 60e3, 70e3),
            Range("moeflow/combine", 200e3, 300e3),  # after the step
        ]
    )
    expected = {"rest of the model": 0.02, "gate": 0.01, "all-to-all": 0.012, "experts": 0.008, "optimizer": 0.01}
    assert times.forward_s == pytest.approx({**expected, OTHER: 0.04})
    assert times.backward_s == {}
    assert sum(times.forward_s.values()) == pytest.approx(times.step_s) == pytest.approx(0.1)
    assert times.operators[-1] == (pytest.approx(0.003), 1, "aten::mm", "gate") or (
        (pytest.approx(0.003), 1, "aten::mm", "gate") in times.operators
    )


@pytest.mark.parametrize("own_thread", [0, 7], ids=["same thread", "thread of its own"])
def test_a_backward_node_goes_where_its_forward_was(own_thread):
    """The number 5 was shown by a view in the gate's range before the node was made in the plan's."""
    times = add_up(
        [
            step(0, 100e3),
            Range("moeflow/gate", 0, 10e3),
            Range("aten::view", 1e3, 2e3, sequence=5),
            Range("moeflow/dispatch", 10e3, 20e3),
            Range("moeflow::dispatch", 11e3, 19e3, sequence=5),
            Range("moeflow/backward", 40e3, 90e3),
            Range(NODE + "DispatchBackward", 50e3, 70e3, own_thread, 5, 0),
            Range("DispatchBackward", 51e3, 69e3, own_thread, 5, 0, True),
            Range("moeflow/all-to-all", 55e3, 60e3, own_thread),
            Range(NODE + "AccumulateGrad", 70e3, 74e3, own_thread),
        ]
    )
    assert times.forward_s == pytest.approx({"gate": 0.01, "dispatch": 0.01, OTHER: 0.03})
    assert times.backward_s == pytest.approx({"dispatch": 0.015, "all-to-all": 0.005, "rest of the model": 0.03})


def test_means_over_steps_without_the_first():
    ranges = [step(0, 9e6), step(10e6, 11e6), step(20e6, 23e6), Range("moeflow/gate", 20e6, 21e6)]
    times = add_up([*ranges, Range("moeflow/gate", 0, 5e6)], skip=1)
    assert times.step_s == pytest.approx(2.0)
    assert times.forward_s == pytest.approx({"gate": 0.5, OTHER: 1.5})


def test_operators_without_marks_tell_by_their_names():
    """In a compiled graph."""
    times = add_up(
        [
            step(0, 10e3),
            Range(NODE + "CompiledFunctionBackward", 0, 10e3),
            Range("moeflow::combine_backward", 1e3, 2e3),
            Range("moeflow::grouped_mlp_backward", 2e3, 5e3),
        ]
    )
    assert times.backward_s == pytest.approx({"combine": 0.001, "experts": 0.003, "rest of the model": 0.006})


def test_fsdp_marks_its_own_exchange():
    gather = Range("FSDP::all_gather (blocks.0)", 1e3, 4e3)
    times = add_up([step(0, 10e3), Range("moeflow/rest of the model", 0, 10e3), gather])
    assert times.forward_s == pytest.approx({"rest of the model": 0.007, "gradient sync": 0.003})


def test_kernels_count_for_the_phase_that_started_them():
    times = add_up([step(0, 10e3), Range("moeflow/gate", 0, 1e3), Range("aten::mm", 0, 500, device_us=4e3)])
    assert times.device_s == pytest.approx({"gate": 0.004})


def test_a_layer_shows_all_its_phases_forward_and_backward():
    torch.manual_seed(0)
    layer = MoELayer(16, 4, 32, "gshard", shared=SharedExperts(DenseMLP(16, 8), 16))
    with phases.marks(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        for _ in range(2):
            with torch.profiler.record_function(phases.STEP):
                layer(torch.randn(50, 16, requires_grad=True)).sum().backward()
    times = add_up(ranges_of(recorded), skip=1)
    named = {"gate", "dispatch", "experts", "combine", "shared experts"}
    assert named | {"plan"} <= set(times.forward_s)
    assert named <= set(times.backward_s)
    total = sum(times.forward_s.values()) + sum(times.backward_s.values())
    assert total == pytest.approx(times.step_s, rel=1e-6)


def test_a_compiled_layer_is_still_one_graph_while_somebody_profiles():
    torch._dynamo.reset()
    layer = MoELayer(8, 4, 16, "naive")
    x = torch.randn(12, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for again in range(2):
        with phases.marks() if again else contextlib.nullcontext():
            torch.testing.assert_close(compiled(x), layer(x))


def test_marks_are_the_same_empty_context_while_nobody_profiles():
    off = phases.phase("gate")
    assert isinstance(off, contextlib.nullcontext)
    assert phases.phase("experts") is off
    with phases.marks():
        assert isinstance(phases.phase("gate"), torch.profiler.record_function)
    assert phases.phase("gate") is off
