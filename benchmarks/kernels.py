"""Speed of the CUDA kernels on a GPU, beside the bytes they have to move, plain torch, and other libraries' permutes.

    python benchmarks/kernels.py --json kernels.json       on a GPU: checks, then one table; under five minutes
    python benchmarks/kernels.py --dry-run                 without one: runs all of its code on small CPU tensors

Needs torch, CuPy and nothing else; Triton and Transformer Engine are measured where they are installed.  Each kernel is
captured into a CUDA graph, so that the time is the device's; caches are flushed between runs; the figure is the median.
"share of copy" is the time in which the same bytes pass a plain copy, measured in this run, over the kernel's time.
Exit status: 0 done, 1 a check failed, 2 nothing to run on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import kernel_checks as checks
import kernel_peers as peers
import torch
from torch import Tensor, nn

from moeflow import ops
from moeflow.ops import activation as act
from moeflow.ops import backend, kernel_calls

Run = Callable[[], Any]
# (T, E, K, D): the first is the size of the goals below.
GRID = ((16384, 64, 2, 4096), (8192, 8, 2, 4096), (4096, 256, 8, 7168), (16384, 64, 8, 1024))
SMALL = ((64, 8, 2, 32),)
# (T, E, K, D, F) of whole layers
LAYERS = ((16384, 64, 2, 4096, 2048), (16384, 8, 2, 4096, 4096))
SMALL_LAYERS = ((64, 8, 2, 32, 64),)
GOALS = {"rows": 0.85, "routing": 0.10, "layer": 0.75}
REPEATS = 20


@dataclass
class Case:
    """One kernel at one size.

    Attributes:
        num_bytes: that it must move, each tensor once.
        run: launches it.
        plain: the same with plain torch.
        others: the same with other libraries; each makes its run, or raises ImportError.
    """

    kernel: str
    size: str
    num_bytes: int
    run: Run
    plain: Run
    others: dict[str, Callable[[], Run]] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--dry-run", action="store_true", help="small CPU tensors; the figures mean nothing")
    options = parser.parse_args(arguments)
    if options.dry_run:
        _run_on_host()
        device = torch.device("cpu")
    else:
        reason = _missing()
        if reason is not None:
            print(f"nothing to measure: {reason} (--dry-run needs no GPU)", file=sys.stderr)
            return 2
        device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    results: dict[str, Any] = {"date": str(datetime.date.today()), "dry_run": options.dry_run, **_machine(device)}
    for key, value in results.items():
        print(f"{key}: {value}")
    for operator, how, why in backend.describe(device.type):
        print(f"{operator}: {how} ({why})")
    results["failed_checks"] = check(device)
    clock = Clock(device)
    results["copy_bytes_per_s"] = clock.copy_bandwidth()
    print(f"copy bandwidth: {results['copy_bytes_per_s'] / 1e9:.0f} GB/s\n")
    print("| kernel | size | us | bytes | share of copy | plain torch us | others us |")
    print("|---|---|---:|---:|---:|---:|---|")
    results["kernels"] = []
    for size in SMALL if options.dry_run else GRID:
        for case in cases(device, torch.bfloat16, *size):
            results["kernels"].append(measure(clock, case, results["copy_bytes_per_s"]))
    print("\n| layer | forward and backward ms | TFLOP/s | dense MLP TFLOP/s | share of dense | gate and plan |")
    print("|---|---:|---:|---:|---:|---:|")
    results["layers"] = [measure_layer(clock, device, *size) for size in (SMALL_LAYERS if options.dry_run else LAYERS)]
    if not options.dry_run:
        results["goals"] = goals(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 1 if results["failed_checks"] else 0


def _missing() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    from moeflow.ops import _cupy

    return _cupy.unavailable()


def _run_on_host() -> None:
    """Let the kernels run on CPU tensors, by the tests' host build (needs g++)."""
    from moeflow.ops import _cupy
    from tests.cuda_host.fake_cupy import host_engine
    from tests.cuda_host.memory import Arena

    _cupy._engine = host_engine(Arena(), seeds=(0,), strict=False)


def _machine(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__}
    if device.type != "cuda":
        return found | {"card": "none: a dry run"}
    import cupy

    properties = torch.cuda.get_device_properties(device)
    return found | {
        "cupy": cupy.__version__,
        "cuda": torch.version.cuda,
        "card": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
    }


def check(device: torch.device) -> list[str]:
    """Run every check on the device; returns those that failed, after saying why."""
    failures, start = [], time.perf_counter()
    sizes = checks.SIZES if device.type == "cuda" else checks.SIZES[2:3]
    runs: list[tuple[str, Run]] = [
        (f"{name} {size} {dtype}", lambda each=each, dtype=dtype, size=size: each(device, dtype, size))
        for name, each in checks.CHECKS.items()
        for dtype in checks.DTYPES
        for size in sizes
    ]
    if device.type == "cuda":
        runs += [(name, lambda each=each: each(device)) for name, each in checks.ON_GPU.items()]
    for name, run in runs:
        try:
            run()
        except Exception as error:
            failures.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {error}", file=sys.stderr)
    print(f"checks: {len(runs) - len(failures)} of {len(runs)} hold ({time.perf_counter() - start:.0f} s)")
    return failures


class Clock:
    """Times on one device, in seconds."""

    def __init__(self, device: torch.device):
        self.device, self.cuda = device, device.type == "cuda"
        # Twice the largest cache of today's cards.
        self.flush = torch.empty(2**28 if self.cuda else 2**10, dtype=torch.uint8, device=device)

    def __call__(self, run: Run, graph: bool = True) -> float:
        """Median time of `run`, with cold caches."""
        if not self.cuda:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        replay = run
        if graph:
            try:
                replay = self._captured(run)
            except RuntimeError as error:
                print(f"not captured, so that times of the host are in the next figure: {error}", file=sys.stderr)
        for _ in range(3):
            replay()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
        for before, after in events:
            self.flush.zero_()
            before.record()
            replay()
            after.record()
        torch.cuda.synchronize(self.device)
        return statistics.median(before.elapsed_time(after) for before, after in events) / 1e3

    def _captured(self, run: Run) -> Run:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            run()  # compiles, which a capture forbids
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def copy_bandwidth(self) -> float:
        """Bytes a second, read and written, of a plain copy of one GiB."""
        source = torch.empty(2**30 if self.cuda else 2**16, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self(lambda: target.copy_(source))


def cases(device: torch.device, dtype: torch.dtype, T: int, E: int, K: int, D: int) -> list[Case]:
    """Every kernel at one size."""
    item = torch.empty((), dtype=dtype).element_size()
    row, size = D * item, f"T={T} E={E} K={K} D={D}"
    logits = torch.randn(T, E, device=device)
    scores, weights, ids, _ = kernel_calls.gate_topk(logits, K)
    made = kernel_calls.make_plan(ids, E)
    row_of, slots = made.row_of_TK, made.slot_of_row_R
    x, grad = (torch.randn(T, D, device=device).to(dtype) for _ in range(2))
    rows = kernel_calls.dispatch(x, row_of, slots)
    rows_of_T, tokens_of_R = row_of.long(), slots.long() // K
    maps = 4 * T * K
    half = torch.randn(T * K, 2, D // 2, device=device).to(dtype)
    grad_half, priority = torch.randn(T * K, D // 2, device=device).to(dtype), torch.rand(T, K, device=device)
    grad_scores, grad_weights = torch.randn_like(scores), torch.randn_like(weights)
    counts = torch.full((4, E // 4), T * K // E, device=device)
    regrouped = rows[: int(counts.sum())]
    order = _order(counts)
    capacity = max(1, T * K // E)

    def plain_gate() -> Any:
        probs = logits.softmax(1)
        values, chosen = probs.topk(K, 1)
        return values, torch.zeros(E, device=device).scatter_add_(0, chosen.flatten(), torch.ones(T * K, device=device))

    def plain_gate_backward() -> Tensor:
        total = grad_scores.scatter_add(1, ids, grad_weights)
        return torch._softmax_backward_data(total, scores, 1, torch.float32)

    def plain_combine_backward() -> Any:
        spread = grad[:, None].expand(T, K, D)
        grad_rows = torch.empty_like(rows).index_copy_(
            0, rows_of_T.flatten(), (spread * weights[..., None].to(dtype)).view(-1, D)
        )
        return grad_rows, (spread * rows[rows_of_T]).sum(2)

    return [
        Case("gate", size, T * (8 * E + 12 * K), lambda: kernel_calls.gate_topk(logits, K), plain_gate),
        Case(
            "gate backward",
            size,
            T * (12 * E + 12 * K),
            lambda: kernel_calls.gate_topk_backward(grad_scores, grad_weights, scores, weights, ids, "softmax", False),
            plain_gate_backward,
        ),
        Case("plan", size, T * K * 16, lambda: kernel_calls.make_plan(ids, E), lambda: _plain_plan(ids)),
        Case(
            "capacity",
            size,
            T * K * 20,
            lambda: kernel_calls.limit_by_capacity(ids, E, capacity, priority),
            lambda: _plain_plan(torch.argsort(priority.flatten(), descending=True)),
        ),
        Case(
            "dispatch",
            size,
            T * (1 + K) * row + maps,
            lambda: kernel_calls.dispatch(x, row_of, slots),
            lambda: x.index_select(0, tokens_of_R),
            {
                "triton": lambda: peers.triton_dispatch(x, slots, K),
                "transformer engine": lambda: peers.engine_dispatch(x, ids),
            },
        ),
        Case(
            "combine",
            size,
            T * (1 + K) * row + 2 * maps,
            lambda: kernel_calls.combine(rows, row_of, weights),
            lambda: (rows[rows_of_T] * weights[..., None].to(dtype)).sum(1),
            {
                "triton": lambda: peers.triton_combine(rows, row_of, weights),
                "transformer engine": lambda: peers.engine_combine(x, ids, weights),
            },
        ),
        Case(
            "combine backward",
            size,
            T * (1 + 2 * K) * row + 3 * maps,
            lambda: kernel_calls.combine_backward(grad, rows, weights, row_of, slots),
            plain_combine_backward,
        ),
        Case(
            "dispatch backward",
            size,
            T * (1 + K) * row + maps,
            lambda: kernel_calls.combine(rows, row_of, None),
            lambda: rows[rows_of_T].sum(1),
        ),
        Case(
            "swiglu",
            size,
            T * K * 3 * (D // 2) * item,
            lambda: kernel_calls.activation("swiglu", half),
            lambda: act.forward("swiglu", half),
        ),
        Case(
            "swiglu backward",
            size,
            T * K * 5 * (D // 2) * item,
            lambda: kernel_calls.activation_backward("swiglu", grad_half, half),
            lambda: act.backward("swiglu", grad_half.clone(), half),
        ),
        Case(
            "regroup",
            size,
            2 * regrouped.numel() * item,
            lambda: kernel_calls.regroup(regrouped, counts),
            lambda: regrouped.index_select(0, order),
        ),
    ]


def _plain_plan(ids: Tensor) -> Tensor:
    order = torch.argsort(ids.flatten(), stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=ids.device))


def _order(counts_PE: Tensor) -> Tensor:
    from moeflow.ops.regroup import expert_major

    return expert_major(counts_PE)


def measure(clock: Clock, case: Case, bandwidth: float) -> dict[str, Any]:
    """Time one case, and print its row."""
    seconds = clock(case.run)
    others: dict[str, Any] = {}
    for name, make in case.others.items():
        try:
            others[name] = clock(make(), graph=False)
        except ImportError:
            others[name] = "not installed"
        except Exception as error:  # another library's failure is a figure of that library, and not ours
            others[name] = f"failed: {type(error).__name__}"
    result = {
        "kernel": case.kernel,
        "size": case.size,
        "seconds": seconds,
        "bytes": case.num_bytes,
        "share_of_copy": case.num_bytes / bandwidth / seconds,
        "plain_torch_seconds": clock(case.plain),
        "others": others,
    }
    told = ", ".join(
        f"{name} {found if isinstance(found, str) else f'{found * 1e6:.0f}'}" for name, found in others.items()
    )
    print(
        f"| {case.kernel} | {case.size} | {seconds * 1e6:.1f} | {case.num_bytes:,} | {result['share_of_copy']:.2f} | "
        f"{result['plain_torch_seconds'] * 1e6:.1f} | {told} |",
        flush=True,
    )
    return result


class Dense(nn.Module):
    """The dense MLP with the active FLOPs of the layer: K times the hidden width of one expert."""

    def __init__(self, d_model: int, d_hidden: int):
        super().__init__()
        self.w_in = nn.Linear(d_model, 2 * d_hidden, bias=False)
        self.w_out = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate, up = self.w_in(x_TD).chunk(2, 1)
        return self.w_out(nn.functional.silu(gate) * up)


def measure_layer(clock: Clock, device: torch.device, T: int, E: int, K: int, D: int, F: int) -> dict[str, Any]:
    """Time a layer forward and backward beside the dense MLP, and its gate and plan by themselves."""
    from moeflow.moe import MoELayer
    from moeflow.schema.gate import NaiveGateConfig

    with torch.device(device):
        layer = MoELayer(D, E, F, NaiveGateConfig(top_k=K), "swiglu", bias=False).to(torch.bfloat16)
        dense = Dense(D, K * F).to(torch.bfloat16)
        x, grad = (torch.randn(T, D, dtype=torch.bfloat16) for _ in range(2))
    flops = 3 * 2 * T * K * 3 * D * F  # forward and twice that backward; three matrices

    def step(module: nn.Module) -> Run:
        def run() -> None:
            module.zero_grad(set_to_none=True)
            module(x.detach().requires_grad_()).backward(grad)

        return run

    def routing() -> None:
        ops.make_plan(layer.gate(x).ids_TK, E, may_drop=False)

    moe, beside = clock(step(layer), graph=False), clock(step(dense), graph=False)
    with torch.no_grad():
        share = clock(routing, graph=False) / moe
    result = {
        "layer": f"T={T} E={E} K={K} D={D} F={F}",
        "seconds": moe,
        "flops_per_s": flops / moe,
        "dense_flops_per_s": flops / beside,
        "share_of_dense": beside / moe,
        "gate_and_plan": share,
    }
    print(
        f"| {result['layer']} | {moe * 1e3:.2f} | {flops / moe / 1e12:.1f} | {flops / beside / 1e12:.1f} | "
        f"{beside / moe:.2f} | {share:.2f} |",
        flush=True,
    )
    return result


def goals(results: dict[str, Any]) -> dict[str, bool]:
    """Whether each goal is met, printed."""
    moved = ("dispatch", "combine", "combine backward", "dispatch backward")
    size = results["kernels"][0]["size"]
    shares = [r["share_of_copy"] for r in results["kernels"] if r["size"] == size and r["kernel"] in moved]
    first = results["layers"][0]
    met = {
        f"dispatch and combine at {GOALS['rows']:.0%} of the copy ({size})": min(shares) >= GOALS["rows"],
        f"gate and plan under {GOALS['routing']:.0%} of the layer": first["gate_and_plan"] < GOALS["routing"],
        f"layer at {GOALS['layer']:.0%} of the dense MLP": first["share_of_dense"] >= GOALS["layer"],
    }
    print()
    for goal, reached in met.items():
        print(f"{'met' if reached else 'MISSED'}: {goal}")
    return met


if __name__ == "__main__":
    sys.exit(main())
