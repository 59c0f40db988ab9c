"""Where the time of a step went: ranges of a profile, added up by phase.

Time belongs to the innermost range that names a phase: a mark of `moeflow.ops.phases`, torch's own mark of an optimizer
step, or one of the layer's operators in a graph that has no marks.  A node of the backward pass belongs to the phase in
which its forward operation ran: torch gives both the same sequence number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moeflow.ops.phases import BACKWARD, PHASES, PREFIX, REST, STEP

#: What is in no phase: Python between them.
OTHER = "other"
ROWS = (*PHASES, OTHER)

_NODE = "autograd::engine::evaluate_function"
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
# FSDP's hooks: parameters are gathered, gradients reduced.
_SYNC = ("FSDP::",)
# Operators that tell their phase by their name, where nothing else does.
_OPERATORS = {
    "moeflow::gate": "gate",
    "moeflow::top_k": "gate",
    "moeflow::make_plan": "plan",
    "moeflow::make_padded_plan": "plan",
    "moeflow::histogram": "plan",
    "moeflow::dispatch": "dispatch",
    "moeflow::gather_sum": "dispatch",
    "moeflow::regroup": "all-to-all",
    "moeflow::combine": "combine",
}
_EXPERTS = ("moeflow::grouped_",)


@dataclass(slots=True)
class Range:
    """One range of a profile.

    Attributes:
        name: of the operator or mark.
        start: microseconds.
        end: microseconds.
        thread: that it ran on.
        sequence: number that ties a backward node to its forward operation; -1 without one.
        forward_thread: of the forward operation, for a backward node.
        backward: whether it is a node of the backward pass.
        device_us: microseconds of the kernels that it started itself.
    """

    name: str
    start: float
    end: float
    thread: int = 0
    sequence: int = -1
    forward_thread: int = 0
    backward: bool = False
    device_us: float = 0.0


@dataclass(slots=True)
class Times:
    """Seconds of one step, means over the profiled ones.

    Attributes:
        step_s: of the whole step.
        forward_s: phase -> seconds outside the backward pass.
        backward_s: phase -> seconds in it.
        device_s: phase -> seconds of kernels; empty on CPUs.
        operators: (seconds, calls, operator, phase), without what they call, the longest first.
    """

    step_s: float
    forward_s: dict[str, float] = field(default_factory=dict)
    backward_s: dict[str, float] = field(default_factory=dict)
    device_s: dict[str, float] = field(default_factory=dict)
    operators: list[tuple[float, float, str, str]] = field(default_factory=list)

    def total_s(self, phase: str) -> float:
        """Forward and backward."""
        return self.forward_s.get(phase, 0.0) + self.backward_s.get(phase, 0.0)


def add_up(ranges: Iterable[Range], skip: int = 0) -> Times:
    """Add up the ranges inside the steps of a profile.

    Args:
        ranges: of one process, in any order.
        skip: steps at the beginning that do not count.

    Returns:
        Means over the steps; the phases' sum is the step's time.
    """
    ordered = sorted(ranges, key=lambda r: (r.thread, r.start, -r.end))
    steps = [r for r in ordered if r.name == STEP][skip:]
    assert steps, "a profile holds steps"
    sums = _Sums(len(steps), steps[0].thread)
    phase_of = _phases_of_sequences(ordered)
    inside = [r for r in ordered if any(step.start <= r.start and r.end <= step.end for step in steps)]
    _walk(inside, phase_of, sums)
    return sums.times(sum(step.end - step.start for step in steps))


class _Sums:
    def __init__(self, num_steps: int, main_thread: int):
        self.num_steps, self.main_thread = num_steps, main_thread
        self.us: dict[tuple[str, bool], float] = defaultdict(float)
        self.device_us: dict[str, float] = defaultdict(float)
        self.operators: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])

    def add(self, item: Range, phase: str, backward: bool, own_us: float) -> None:
        """Count what a range did itself."""
        if item.device_us:
            self.device_us[phase] += item.device_us
        if item.thread != self.main_thread:
            if not backward:
                return  # runs beside the step
            # A backward pass on a thread of its own: the step waits for it.
            self.us[REST, True] -= own_us
        self.us[phase, backward] += own_us
        if not item.name.startswith((PREFIX, _NODE)):
            entry = self.operators[item.name, phase]
            entry[0] += own_us
            entry[1] += 1

    def times(self, steps_us: float) -> Times:
        scale = 1e-6 / self.num_steps
        forward = {row: self.us[row, False] * scale for row in ROWS if self.us[row, False]}
        backward = {row: self.us[row, True] * scale for row in ROWS if self.us[row, True]}
        device = {row: self.device_us[row] * scale for row in ROWS if self.device_us[row]}
        operators = [
            (us * scale, calls / self.num_steps, name, phase) for (name, phase), (us, calls) in self.operators.items()
        ]
        return Times(steps_us * scale, forward, backward, device, sorted(operators, reverse=True))


def _named_phase(name: str, parent: str) -> str | None:
    """The phase that a range's own name tells."""
    if name.startswith(PREFIX):
        mark = name.removeprefix(PREFIX)
        return REST if mark == BACKWARD else mark if mark in PHASES else None
    if name.startswith(_OPTIMIZER):
        return "optimizer"
    if name.startswith(_SYNC):
        return "gradient sync"
    if name.startswith(_EXPERTS):
        return "experts"
    if parent in (REST, OTHER):
        return _OPERATORS.get(name.removesuffix("_backward"))
    return None


def _phases_of_sequences(ordered: Sequence[Range]) -> dict[tuple[int, int], str]:
    """(thread, sequence number) of forward operations -> phase.

    Several operations may show the number that the next node will get; the last of them makes the node.
    """
    found = {}
    for item, _, phase, _ in _nested(ordered, {}):
        if item.sequence >= 0 and not item.backward and not item.name.startswith(_NODE):
            found[item.thread, item.sequence] = phase
    return found


def _walk(ordered: Sequence[Range], phase_of: dict[tuple[int, int], str], sums: _Sums) -> None:
    for item, own_us, phase, backward in _nested(ordered, phase_of):
        sums.add(item, phase, backward, own_us)


def _nested(ordered: Sequence[Range], phase_of: dict[tuple[int, int], str]) -> list[tuple[Range, float, str, bool]]:
    """(range, its time without that of the ranges in it, phase, in the backward pass or not), in the given order."""
    result: list[tuple[Range, float, str, bool]] = []
    own = [item.end - item.start for item in ordered]
    places: list[tuple[str, bool]] = []
    stack: list[int] = []
    for number, item in enumerate(ordered):
        while stack and (ordered[stack[-1]].thread != item.thread or ordered[stack[-1]].end <= item.start):
            stack.pop()
        phase, backward = places[stack[-1]] if stack else (OTHER, False)
        if stack:
            # No more than what is left of the parent: clocks of ranges that end together may cross.
            own[stack[-1]] -= min(item.end, ordered[stack[-1]].end) - item.start
        if item.name.startswith(_NODE):
            backward = True
            phase = phase_of.get((item.forward_thread, item.sequence), REST)
        elif item.name == PREFIX + BACKWARD:
            backward = True
        phase = _named_phase(item.name, phase) or phase
        places.append((phase, backward))
        stack.append(number)
    for item, own_us, (phase, backward) in zip(ordered, own, places, strict=True):
        result.append((item, own_us, phase, backward))
    return result
