"""Gate, top-k, histogram, plan and capacity: the CUDA sources, run on the host, against loops and against torch."""

from __future__ import annotations

import pytest
import torch

from moeflow.ops import kernel_calls
from moeflow.ops._cupy import KernelError
from tests.cuda_host.fake_cupy import with_engine
from tests.cuda_host.host import HostError
from tests.cuda_host.memory import Arena
from tests.ops.test_kernels_permute import DTYPES, TOLERANCE, relative_error


def slow_top_k(scores: torch.Tensor, k: int) -> list[list[int]]:
    """Ids of the k highest, of equal ones the lowest id first."""
    return [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in scores.double().tolist()]


def logits_for(num_tokens: int, num_experts: int, seed: int, dtype=torch.float32) -> torch.Tensor:
    """Random logits with ties: values are multiples of 1/8, so that equal ones are frequent."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_tokens, num_experts, generator=generator) * 16).round().div(8).to(dtype)


# (T, E, K, pointer offset in bytes)
GATES = [
    (0, 8, 2, 0),
    (1, 1, 1, 0),
    (1, 2, 2, 0),
    (37, 8, 2, 0),
    (9, 7, 3, 0),
    (21, 33, 4, 0),
    (10, 64, 8, 0),
    (12, 96, 5, 4),
    (9, 128, 1, 0),
    (8, 200, 6, 0),
    (9, 256, 7, 8),
    (7, 511, 8, 0),
    (5, 512, 8, 0),
    (3, 384, 32, 0),
]


# The architectures differ in reductions over a warp, whatever the dtype.
@pytest.mark.parametrize(("dtype", "arch"), [*((dtype, 900) for dtype in DTYPES), (torch.float32, 700)], ids=str)
@pytest.mark.parametrize("shape", GATES, ids=lambda s: "T{}-E{}-K{}-off{}".format(*s))
def test_gate(shape, dtype, arch, monkeypatch):
    num_tokens, num_experts, k, offset = shape
    arena = Arena(side="start" if num_tokens % 2 else "end", offset=offset)
    # 900 is what sources take where nothing is defined: the same build as the other tests'.
    with_engine(monkeypatch, arena, defines=[] if arch == 900 else [f"-DMOEFLOW_ARCH={arch}"])
    logits = logits_for(num_tokens, num_experts, num_tokens + k, dtype)
    bias = torch.randn(num_experts, generator=torch.Generator().manual_seed(2))
    logits_g, bias_g = arena.put(logits, "logits"), arena.put(bias, "bias")

    values, ids = kernel_calls.top_k(logits_g, k)
    assert values.dtype == dtype and ids.tolist() == slow_top_k(logits, k)
    assert torch.equal(values, logits.gather(1, ids))

    for score, normalize, biased in (("softmax", False, False), ("softmax", True, False), ("sigmoid", True, True)):
        wide = logits.double().requires_grad_()
        want_scores = wide.softmax(1) if score == "softmax" else wide.sigmoid()
        scores, weights, ids, counts = kernel_calls.gate_topk(logits_g, k, score, normalize, bias_g if biased else None)
        assert relative_error(scores, want_scores) < 1e-5
        # The order of the kernel's own scores: two experts may be nearer than rounding.
        assert ids.tolist() == slow_top_k(scores + bias if biased else scores, k)
        assert counts.tolist() == torch.bincount(ids.flatten(), minlength=num_experts).tolist()
        want_weights = want_scores.gather(1, ids)
        if normalize:
            want_weights = want_weights / want_weights.sum(1, keepdim=True)
        assert relative_error(weights, want_weights) < 1e-5

        generator = torch.Generator().manual_seed(3)
        grad_scores = torch.randn(num_tokens, num_experts, generator=generator)
        grad_weights = torch.randn(num_tokens, k, generator=generator)
        for use_scores, use_weights in ((True, True), (False, True), (True, False)):
            loss = (want_scores * grad_scores).sum() * use_scores + (want_weights * grad_weights).sum() * use_weights
            (want,) = torch.autograd.grad(loss, wide, retain_graph=True)
            got = kernel_calls.gate_topk_backward(
                arena.put(grad_scores) if use_scores else None,
                arena.put(grad_weights) if use_weights else None,
                scores,
                weights,
                ids,
                score,
                normalize,
                dtype,
            )
            assert got.dtype == dtype
            # One expert, or one choice that is all: the gradient is zero up to rounding.
            assert relative_error(got, want) < TOLERANCE[dtype] or (got - want).abs().max() < 1e-6


def test_gate_with_ties_infinities_and_nan(monkeypatch):
    arena = Arena()
    with_engine(monkeypatch, arena)
    inf, nan = float("inf"), float("nan")
    scores = torch.tensor([[1.0, 1, 1, 1], [-inf, -inf, -inf, -inf], [0.0, -0.0, 0.0, -1], [1, nan, inf, 2]])
    _, ids = kernel_calls.top_k(arena.put(scores), 3)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2, 3]]


def random_ids(num_tokens: int, top_k: int, num_experts: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens + 7 * num_experts)
    ids = torch.randint(num_experts, (num_tokens, top_k), generator=generator)
    if kind == "one":
        ids.fill_(num_experts - 1)
    if kind == "dropped":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    if kind == "none":
        ids.fill_(-1)
    return ids


# (T, K, E, kind)
PLANS = [
    (0, 2, 4, "any"),
    (1, 1, 1, "any"),
    (1, 8, 512, "any"),
    (5, 2, 3, "dropped"),
    (700, 3, 7, "dropped"),
    (1024, 2, 8, "any"),
    (2500, 2, 64, "any"),
    (1100, 4, 2, "one"),
    (900, 5, 1024, "dropped"),
    (700, 8, 512, "any"),
    (40, 2, 5, "none"),
]


@pytest.mark.parametrize("pad", [1, 16])
@pytest.mark.parametrize("choice_major", [False, True])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: "T{}-K{}-E{}-{}".format(*p))
def test_plan(plan, choice_major, pad, monkeypatch):
    num_tokens, top_k, num_experts, kind = plan
    arena = Arena()
    with_engine(monkeypatch, arena)
    ids = random_ids(num_tokens, top_k, num_experts, kind)
    ids_g = arena.put(ids, "ids")
    order = [(k, t) if choice_major else (t, k) for t in range(num_tokens) for k in range(top_k)]
    queues: list[list[int]] = [[] for _ in range(num_experts)]
    for a, b in sorted(order):
        t, k = (b, a) if choice_major else (a, b)
        if ids[t, k] >= 0:
            queues[ids[t, k]].append(t * top_k + k)
    slots: list[int] = []
    offsets = [0]
    for queue in queues:
        slots += queue + [-1] * (-len(queue) % pad)
        offsets.append(len(slots))
    row_of = [-1] * ids.numel()
    for row, slot in enumerate(slots):
        if slot >= 0:
            row_of[slot] = row

    got = kernel_calls.make_plan(ids_g, num_experts, pad=pad, choice_major=choice_major)
    assert got.tokens_per_expert_E.tolist() == [len(queue) for queue in queues]
    assert got.offsets.tolist() == offsets
    assert got.row_of_TK.flatten().tolist() == row_of
    num_rows = num_tokens * top_k + num_experts * (pad - 1)
    assert got.slot_of_row_R.tolist() == slots + [-1] * (num_rows - len(slots))
    exact = kernel_calls.make_plan(ids_g, num_experts, exact=True, pad=pad, choice_major=choice_major)
    assert exact.slot_of_row_R.tolist() == slots
    assert kernel_calls.histogram(ids_g, num_experts).tolist() == [len(queue) for queue in queues]


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: "T{}-K{}-E{}-{}".format(*p))
def test_plan_with_fixed_rows(plan, monkeypatch):
    num_tokens, top_k, num_experts, kind = plan
    arena = Arena()
    with_engine(monkeypatch, arena)
    ids = random_ids(num_tokens, top_k, num_experts, kind)
    ids_g = arena.put(ids, "ids")
    most = int(torch.bincount(ids[ids >= 0], minlength=num_experts).max())
    capacity = max(most, 1)
    got = kernel_calls.make_plan(ids_g, num_experts, capacity=capacity)
    want = []
    for expert in range(num_experts):
        slots = (ids.flatten() == expert).nonzero().flatten().tolist()
        want += slots + [-1] * (capacity - len(slots))
    assert got.slot_of_row_R.tolist() == want
    row_of = {slot: row for row, slot in enumerate(want) if slot >= 0}
    assert got.row_of_TK.flatten().tolist() == [row_of.get(slot, -1) for slot in range(ids.numel())]
    if most > 1:
        with pytest.raises(HostError, match="more choices than rows"):
            kernel_calls.make_plan(ids_g, num_experts, capacity=most - 1)


# Every plan under every policy, but the large ones quickly under one policy each, and slowly under the others.
LARGE = {(2500, 2, 64, "any"): "ties", (1100, 4, 2, "one"): "priority", (700, 8, 512, "any"): "priority"}
CAPACITIES = [
    pytest.param(
        plan,
        policy,
        id="T{}-K{}-E{}-{}-{}".format(*plan, policy),
        marks=[pytest.mark.slow] if LARGE.get(plan, policy) != policy else [],
    )
    for plan in PLANS
    for policy in ("position", "priority", "ties")
]


@pytest.mark.parametrize(("plan", "policy"), CAPACITIES)
def test_capacity(plan, policy, monkeypatch):
    num_tokens, top_k, num_experts, kind = plan
    arena = Arena()
    with_engine(monkeypatch, arena)
    ids = random_ids(num_tokens, top_k, num_experts, kind)
    priority = torch.randn(ids.shape, generator=torch.Generator().manual_seed(5))
    if policy == "ties":
        priority = priority.round()
    mean = -(-ids.numel() // num_experts)
    ids_g, priority_g = arena.put(ids, "ids"), arena.put(priority, "priority")
    # Many experts are as many blocks, each of which the host runs thread by thread.
    for capacity in {0, 1, mean // 2, mean, mean + 3, ids.numel()} if num_experts < 512 else {mean // 2 + 1}:
        ranked = [(k, t) for k in range(top_k) for t in range(num_tokens)]
        if policy != "position":
            ranked.sort(key=lambda kt: -float(priority[kt[1], kt[0]]))
        taken, want = [0] * num_experts, torch.full_like(ids, -1)
        for k, t in ranked:
            expert = int(ids[t, k])
            if expert >= 0 and taken[expert] < capacity:
                taken[expert] += 1
                want[t, k] = expert
        got = kernel_calls.limit_by_capacity(ids_g, num_experts, capacity, None if policy == "position" else priority_g)
        assert torch.equal(got, want)


def test_an_id_beyond_the_experts_stops_the_kernel(monkeypatch):
    arena = Arena()
    with_engine(monkeypatch, arena)
    ids = arena.put(torch.tensor([[0, 4]]))
    for call in (kernel_calls.histogram, kernel_calls.make_plan):
        with pytest.raises(HostError, match="not below the number of experts"):
            call(ids, 4)


def test_sizes_out_of_range_are_refused(monkeypatch):
    arena = Arena()
    with_engine(monkeypatch, arena)
    with pytest.raises(KernelError, match="1025 experts"):
        kernel_calls.histogram(arena.put(torch.zeros(3, dtype=torch.int64)), 1025)
    with pytest.raises(KernelError, match="up to 512 experts"):
        kernel_calls.top_k(arena.put(torch.zeros(3, 513)), 2)
    with pytest.raises(KernelError, match="no more than there are experts"):
        kernel_calls.top_k(arena.put(torch.zeros(3, 2)), 3)
