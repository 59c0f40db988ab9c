"""What the CUDA kernels must do on the device they run on: each check raises AssertionError where it does not hold.

Legend: T tokens, D model, F ffn, E experts, K top-k, R rows.

Used by benchmarks/kernels.py, and by tests/ops/test_on_device.py (on a GPU there, and on the host otherwise).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from moeflow import ops
from moeflow.ops import activation as act
from moeflow.ops import kernel_calls

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
DTYPES = tuple(TOLERANCE)
# (T, E, K, D): awkward ones
SIZES = ((0, 4, 2, 16), (1, 1, 1, 1), (37, 7, 3, 33), (64, 64, 2, 1024), (50, 512, 8, 264))


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in fp64."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def _near(what: str, got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    if want.numel() == 0:
        assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
        return
    error, largest = relative_error(got, want), float((got - want).detach().abs().max())
    # Gradients that are zero up to rounding (one expert) have no relative error.
    assert error < TOLERANCE[dtype] or largest < 1e-6, f"{what}: relative error {error:.1e} in {dtype}"


def gate(device: torch.device, dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    """Scores, choices, load and the gradient of the logits, against torch in fp64."""
    num_tokens, num_experts, k, _ = size
    logits = torch.randn(num_tokens, num_experts, device=device).to(dtype)
    for score, normalize in (("softmax", True), ("sigmoid", False)):
        wide = logits.double().requires_grad_()
        want_scores = wide.softmax(1) if score == "softmax" else wide.sigmoid()
        scores, weights, ids, counts = kernel_calls.gate_topk(logits, k, score, normalize)
        chosen = want_scores.gather(1, ids)
        _near("scores", scores, want_scores, torch.float32)
        _near("chosen scores", chosen, want_scores.topk(k, 1).values, torch.float32)
        assert torch.equal(counts, ops.histogram(ids.cpu(), num_experts).to(device)), "load of the experts"
        want_weights = chosen / chosen.sum(1, keepdim=True) if normalize else chosen
        _near("weights", weights, want_weights, torch.float32)
        grad_scores, grad_weights = torch.randn_like(scores), torch.randn_like(weights)
        loss = (want_scores * grad_scores).sum() + (want_weights * grad_weights).sum()
        (want,) = torch.autograd.grad(loss, wide)
        got = kernel_calls.gate_topk_backward(grad_scores, grad_weights, scores, weights, ids, score, normalize, dtype)
        _near("gradient of the logits", got, want, dtype)


def plan(device: torch.device, dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    """Maps, counts and capacity: the very same as plain torch's on the CPU."""
    num_tokens, num_experts, k, _ = size
    for ids in (
        torch.randint(-1, num_experts, (num_tokens, k)),
        torch.full((num_tokens, k), num_experts - 1),
    ):
        want = _plain(functools.partial(ops.make_plan, ids, num_experts))
        got = kernel_calls.make_plan(ids.to(device), num_experts, exact=True)
        for name, have in (
            ("tokens_per_expert_E", got.tokens_per_expert_E),
            ("row_of_TK", got.row_of_TK),
            ("slot_of_row_R", got.slot_of_row_R),
        ):
            assert torch.equal(have.cpu(), getattr(want, name)), name
        priority, capacity = torch.rand(num_tokens, k), max(1, num_tokens * k // (2 * num_experts))
        for policy in ("position", "probability"):
            kept = _plain(functools.partial(ops.limit_by_capacity, ids, num_experts, capacity, policy, priority))
            ranks = None if policy == "position" else priority.to(device)
            assert torch.equal(kernel_calls.limit_by_capacity(ids.to(device), num_experts, capacity, ranks).cpu(), kept)


def rows(device: torch.device, dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    """dispatch and combine, forward and backward, against gathers in fp64; twice, with the same bits."""
    num_tokens, num_experts, k, width = size
    ids = torch.randint(-1, num_experts, (num_tokens, k))
    made = _plain(lambda: ops.make_plan(ids, num_experts))
    row_of, slots = made.row_of_TK.to(device), made.slot_of_row_R.to(device)
    x, grad = (torch.randn(num_tokens, width, device=device).to(dtype) for _ in range(2))
    moved = kernel_calls.dispatch(x, row_of, slots)
    assert torch.equal(moved, x[slots.long() // k]), "dispatch"
    hidden, weights = torch.randn(moved.shape, device=device).to(dtype), torch.rand(num_tokens, k, device=device)
    kept = (row_of >= 0)[..., None]
    picked = torch.zeros(num_tokens, k, width, device=device, dtype=torch.float64)
    if len(slots):
        picked = torch.where(kept, hidden.double()[row_of.clamp(min=0).long()], 0.0)
    _near(
        "combine", kernel_calls.combine(hidden, row_of, weights), (weights.double()[..., None] * picked).sum(1), dtype
    )
    _near("combine without weights", kernel_calls.combine(hidden, row_of, None), picked.sum(1), dtype)
    both = [kernel_calls.combine_backward(grad, hidden, weights, row_of, slots) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True)), "two runs differ"
    grad_rows, grad_weights = both[0]
    want = (weights.double()[..., None] * grad.double()[:, None])[row_of >= 0]
    _near("gradient of the rows", grad_rows[row_of[row_of >= 0].long()], want, dtype)
    _near("gradient of the weights", grad_weights, (grad.double()[:, None] * picked).sum(2), torch.bfloat16)


def hidden(device: torch.device, dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    """Activations with their gradients, against torch in fp64."""
    num_rows, width = size[0], size[3]
    for name in ("gelu", "swiglu"):
        pre = torch.randn(num_rows, *([2] if act.is_gated(name) else []), width, device=device).to(dtype)
        grad = torch.randn(num_rows, width, device=device).to(dtype)
        _near(name, kernel_calls.activation(name, pre), act.forward(name, pre.double()), dtype)
        got, _ = kernel_calls.activation_backward(name, grad, pre)
        _near(f"gradient of {name}", got, act.backward(name, grad.double(), pre.double()), dtype)


def regroup(device: torch.device, dtype: torch.dtype, size: tuple[int, int, int, int]) -> None:
    """Rows between the orders of ranks and of experts, and back."""
    counts = torch.randint(0, 5, (3, min(size[1], 64)))
    before = torch.randn(int(counts.sum()), size[3]).to(dtype)
    pieces = before.split(counts.flatten().tolist())
    want = torch.cat([pieces[r * counts.shape[1] + e] for e in range(counts.shape[1]) for r in range(3)])
    got = kernel_calls.regroup(before.to(device), counts.to(device))
    assert torch.equal(got.cpu(), want), "regroup"
    assert torch.equal(kernel_calls.regroup(got, counts.to(device), inverse=True).cpu(), before), "regroup back"


CHECKS: dict[str, Callable[[torch.device, torch.dtype, tuple[int, int, int, int]], None]] = {
    "gate": gate,
    "plan": plan,
    "rows": rows,
    "hidden": hidden,
    "regroup": regroup,
}


def _plain(compute: Callable):
    """The result of plain torch on CPU tensors, also where a test lets CPU tensors run on the kernels."""
    from moeflow.ops import backend

    chosen = backend.use_cupy
    backend.use_cupy = lambda *_: False  # type: ignore[assignment]
    try:
        return compute()
    finally:
        backend.use_cupy = chosen


# --- only on a GPU ---


def graph(device: torch.device) -> None:
    """A captured layer of data movement follows its inputs on replay, and captures nothing of the host."""
    x, ids = torch.randn(256, 64, device=device), torch.randint(8, (256, 2), device=device)

    def step() -> Tensor:
        made = ops.make_plan(ids, 8, may_drop=False)
        return ops.combine(ops.dispatch(x, made), made)

    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream(device).wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = step()
    x.normal_()
    ids.random_(8)
    captured.replay()
    assert torch.equal(y, x + x), "replay of a CUDA graph"


def streams(device: torch.device) -> None:
    """A kernel on a side stream waits for what that stream waits for."""
    x = torch.zeros(4096, 256, device=device)
    ids = torch.randint(8, (4096, 2), device=device)
    made = ops.make_plan(ids, 8, may_drop=False)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        x.fill_(1)
        got = ops.dispatch(x, made)
    torch.cuda.current_stream(device).wait_stream(side)
    assert bool((got == 1).all()), "side stream"


def compiled(device: torch.device) -> None:
    """torch.compile of a whole layer gives what it gives without."""
    from moeflow.moe import MoELayer

    layer = MoELayer(d_model=64, num_experts=8, d_hidden=128, activation="swiglu").to(device)
    x = torch.randn(128, 64, device=device)
    want, got = layer(x), torch.compile(layer)(x)
    assert relative_error(got, want) < 1e-5, "torch.compile"


def devices(device: torch.device) -> None:
    """Two devices in one process, whichever is current."""
    for index in range(min(2, torch.cuda.device_count())):
        rows(torch.device("cuda", index), torch.float32, SIZES[2])


ON_GPU: dict[str, Callable[[torch.device], None]] = {
    "CUDA graph": graph,
    "side stream": streams,
    "torch.compile": compiled,
    "two devices": devices,
}
