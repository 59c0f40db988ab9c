"""Two-layer MLPs of all local experts over rows that are ordered by expert.

Legend: R rows, D model, F ffn, E experts, O output width.

On CPUs one expert is finished (first layer, activation, second layer) while its rows are in the cache, straight into
one output; the same in the backward pass.  Indexing stacked weights under autograd would instead make a gradient of the
full stack for every expert, which costs O(E^2).  On other devices one layer of all experts is finished before the next,
with one kernel for all experts where there is one (`grouped_gemm`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moeflow.ops import activation as act
from moeflow.ops import backend, grouped_gemm, pool, workers


def grouped_mlp(
    rows_RD: Tensor,
    tokens_per_expert_E: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out_EOF: Tensor,
    b_out_EO: Tensor | None,
    activation: str,
) -> Tensor:
    """Return rows [R, O]: expert e maps its rows x to activation(x w_in[e]^T + b_in[e]) w_out[e]^T + b_out[e].

    Args:
        rows_RD: [R, D], ordered by expert.
        tokens_per_expert_E: int64 [E], rows of each expert; sums to R.
        w_in: [E, F, D], or [E, 2, F, D] (gate, up) for a gated activation.
        b_in: [E, F] or [E, 2, F], or None.
        w_out_EOF: [E, O, F].
        b_out_EO: [E, O], or None.
        activation: a name of `moeflow.ops.activation.NAMES`.

    An expert without rows gets a zero gradient, never a missing one.  Under autocast the products run in its dtype.
    """
    device = rows_RD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows_RD, w_in, w_out_EOF = rows_RD.to(dtype), w_in.to(dtype), w_out_EOF.to(dtype)
        b_in = None if b_in is None else b_in.to(dtype)
        b_out_EO = None if b_out_EO is None else b_out_EO.to(dtype)
    out_RO, _ = _grouped_mlp(rows_RD, tokens_per_expert_E, w_in, b_in, w_out_EOF, b_out_EO, activation)
    return out_RO


def _segments(tokens_per_expert_E: Tensor, num_rows: int) -> list[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of the experts that have rows."""
    counts, start, segments = tokens_per_expert_E.tolist(), 0, []
    for expert, count in enumerate(counts):
        if count:
            segments.append((expert, start, start + count))
        start += count
    assert start == num_rows, f"tokens_per_expert sums to {start}, but there are {num_rows} rows"
    return segments


@torch.library.custom_op("moeflow::grouped_mlp", mutates_args=())
def _grouped_mlp(
    rows_RD: Tensor,
    tokens_per_expert_E: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out_EOF: Tensor,
    b_out_EO: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    if not _one_expert_at_a_time(rows_RD):
        return _layer_at_a_time(rows_RD, tokens_per_expert_E, w_in, b_in, w_out_EOF, b_out_EO, activation)
    num_rows, hidden = rows_RD.shape[0], w_in.shape[1:-1]
    out_RO = pool.empty_rows((num_rows, w_out_EOF.shape[1]), rows_RD)
    pre = pool.empty((num_rows, *hidden), rows_RD)
    segments = _segments(tokens_per_expert_E, num_rows)
    in_place = act.keeps_output(activation)
    pieces = workers.shares([hi - lo for _, lo, hi in segments], torch.get_num_threads())
    scratch = None if in_place else pool.empty((_threads(pieces), _longest(segments), hidden[-1]), rows_RD)

    def one_expert(piece: int, thread: int) -> None:
        e, lo, hi = segments[piece]
        pre_e = pre[lo:hi]
        _linear(rows_RD[lo:hi], w_in[e].flatten(0, -2), None if b_in is None else b_in[e].flatten(), pre_e.flatten(1))
        hidden_e = act.forward(activation, pre_e, pre_e if scratch is None else scratch[thread, : hi - lo])
        _linear(hidden_e, w_out_EOF[e], None if b_out_EO is None else b_out_EO[e], out_RO[lo:hi])

    _run(one_expert, pieces, len(segments))
    return out_RO, pre


def _run(one_expert: Callable[[int, int], None], pieces: list[list[int]] | None, count: int) -> None:
    """Run the experts side by side, one a core, or one after another on all cores where their loads are too uneven."""
    if pieces is not None:
        workers.run(one_expert, pieces)
        return
    for piece in range(count):
        one_expert(piece, 0)


def _threads(pieces: list[list[int]] | None) -> int:
    return 1 if pieces is None else len(pieces)


def _longest(segments: list[tuple[int, int, int]]) -> int:
    """Rows of the busiest expert."""
    return max((hi - lo for _, lo, hi in segments), default=0)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


@_grouped_mlp.register_fake
def _(rows_RD, tokens_per_expert_E, w_in, b_in, w_out_EOF, b_out_EO, activation):
    num_rows = rows_RD.shape[0]
    return rows_RD.new_empty(num_rows, w_out_EOF.shape[1]), rows_RD.new_empty(num_rows, *w_in.shape[1:-1])


@torch.library.custom_op("moeflow::grouped_mlp_backward", mutates_args=())
def _grouped_mlp_backward(
    grad_RO: Tensor,
    rows_RD: Tensor,
    pre: Tensor,
    tokens_per_expert_E: Tensor,
    w_in: Tensor,
    w_out_EOF: Tensor,
    activation: str,
    has_b_in: bool,
    has_b_out: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if not _one_expert_at_a_time(rows_RD):
        return _layer_at_a_time_backward(
            grad_RO, rows_RD, pre, tokens_per_expert_E, w_in, w_out_EOF, activation, has_b_in, has_b_out
        )
    grad_rows_RD = pool.empty_rows(rows_RD.shape, rows_RD)
    grad_w_in, grad_w_out = pool.empty(w_in.shape, w_in), pool.empty(w_out_EOF.shape, w_out_EOF)
    grad_b_in = rows_RD.new_zeros(w_in.shape[:-1] if has_b_in else 0)
    grad_b_out = rows_RD.new_zeros(w_out_EOF.shape[:2] if has_b_out else 0)
    segments = _segments(tokens_per_expert_E, rows_RD.shape[0])
    for e in sorted(set(range(w_in.shape[0])) - {e for e, _, _ in segments}):
        grad_w_in[e].zero_()
        grad_w_out[e].zero_()
    longest, gated, in_place = _longest(segments), act.is_gated(activation), act.keeps_output(activation)
    pieces = workers.shares([hi - lo for _, lo, hi in segments], torch.get_num_threads())
    # One expert's hidden layer, and its gradient: the same memory for all of a core's experts, so that it stays in the
    # cache.
    hidden = pool.empty((_threads(pieces), longest, w_in.shape[-2]), rows_RD)
    scratch = pool.empty((_threads(pieces), longest, *pre.shape[1:]), rows_RD) if gated else None

    def one_expert(piece: int, thread: int) -> None:
        e, lo, hi = segments[piece]
        grad_e, x_e, pre_e, hidden_e = grad_RO[lo:hi], rows_RD[lo:hi], pre[lo:hi], hidden[thread, : hi - lo]
        torch.mm(grad_e.t(), pre_e if in_place else act.forward(activation, pre_e, hidden_e), out=grad_w_out[e])
        torch.mm(grad_e, w_out_EOF[e], out=hidden_e)
        out = None if scratch is None else scratch[thread, : hi - lo]
        grad_pre = act.backward(activation, hidden_e, pre_e, out).flatten(1)
        torch.mm(grad_pre.t(), x_e, out=grad_w_in[e].flatten(0, -2))
        torch.mm(grad_pre, w_in[e].flatten(0, -2), out=grad_rows_RD[lo:hi])
        if has_b_in:
            torch.sum(grad_pre, 0, out=grad_b_in[e].flatten())
        if has_b_out:
            torch.sum(grad_e, 0, out=grad_b_out[e])

    _run(one_expert, pieces, len(segments))
    return grad_rows_RD, grad_w_in, grad_b_in, grad_w_out, grad_b_out


@_grouped_mlp_backward.register_fake
def _(grad_RO, rows_RD, pre, tokens_per_expert_E, w_in, w_out_EOF, activation, has_b_in, has_b_out):
    return (
        torch.empty_like(rows_RD),
        torch.empty_like(w_in),
        rows_RD.new_empty(w_in.shape[:-1] if has_b_in else 0),
        torch.empty_like(w_out_EOF),
        rows_RD.new_empty(w_out_EOF.shape[:2] if has_b_out else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows_RD, tokens_per_expert_E, w_in, b_in, w_out_EOF, b_out_EO, ctx.activation = inputs
    ctx.save_for_backward(rows_RD, output[1], tokens_per_expert_E, w_in, w_out_EOF)
    ctx.has_bias = b_in is not None, b_out_EO is not None
    # Or torch would fill a gradient of the hidden layer, which nothing has used, with zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_RO: Tensor | None, grad_pre: Tensor | None) -> Any:
    if grad_RO is None:
        return (None,) * 7
    has_b_in, has_b_out = ctx.has_bias
    saved = ctx.saved_tensors
    grad_rows, grad_w_in, grad_b_in, grad_w_out, grad_b_out = _grouped_mlp_backward(
        grad_RO.contiguous(), *saved, ctx.activation, has_b_in, has_b_out
    )
    return (
        grad_rows,
        None,
        grad_w_in,
        grad_b_in if has_b_in else None,
        grad_w_out,
        grad_b_out if has_b_out else None,
        None,
    )


_grouped_mlp.register_autograd(_backward, setup_context=_setup_context)


# --- on accelerators: one layer of all experts at a time ---


def _one_expert_at_a_time(rows_RD: Tensor) -> bool:
    return rows_RD.device.type == "cpu"


def _layers(rows_RD: Tensor, tokens_per_expert_E: Tensor, w_in: Tensor, w_out_EOF: Tensor) -> Any:
    """(groups of rows, first layer as [E, H, D], H the hidden width or both halves of it)."""
    w_in_EHD = w_in.flatten(1, -2)
    grouped = grouped_gemm.use_grouped(rows_RD, w_in, w_out_EOF)
    return grouped_gemm.groups(tokens_per_expert_E, rows_RD.shape[0], grouped), w_in_EHD


def _activate(activation: str, pre: Tensor) -> Tensor:
    if backend.use_cupy("activation", pre):
        from moeflow.ops import kernel_calls

        return kernel_calls.activation(activation, pre)
    return act.forward(activation, pre)


def _activate_backward(activation: str, grad_RF: Tensor, pre: Tensor) -> Tensor:
    if backend.use_cupy("activation", pre):
        from moeflow.ops import kernel_calls

        return kernel_calls.activation_backward(activation, grad_RF, pre)[0]
    return act.backward(activation, grad_RF, pre)


def _layer_at_a_time(
    rows_RD: Tensor,
    tokens_per_expert_E: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out_EOF: Tensor,
    b_out_EO: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    of, w_in_EHD = _layers(rows_RD, tokens_per_expert_E, w_in, w_out_EOF)
    pre_RH = grouped_gemm.linear(rows_RD, w_in_EHD, None if b_in is None else b_in.flatten(1), of)
    pre = pre_RH.view(rows_RD.shape[0], *w_in.shape[1:-1])
    return grouped_gemm.linear(_activate(activation, pre), w_out_EOF, b_out_EO, of), pre


def _layer_at_a_time_backward(
    grad_RO: Tensor,
    rows_RD: Tensor,
    pre: Tensor,
    tokens_per_expert_E: Tensor,
    w_in: Tensor,
    w_out_EOF: Tensor,
    activation: str,
    has_b_in: bool,
    has_b_out: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    of, w_in_EHD = _layers(rows_RD, tokens_per_expert_E, w_in, w_out_EOF)
    grad_w_out = grouped_gemm.grad_weight(grad_RO, _activate(activation, pre), of)
    grad_pre = _activate_backward(activation, grouped_gemm.grad_rows(grad_RO, w_out_EOF, of), pre).flatten(1)
    return (
        grouped_gemm.grad_rows(grad_pre, w_in_EHD, of),
        grouped_gemm.grad_weight(grad_pre, rows_RD, of).view_as(w_in),
        grouped_gemm.grad_bias(grad_pre, of).view(w_in.shape[:-1]) if has_b_in else rows_RD.new_empty(0),
        grad_w_out,
        grouped_gemm.grad_bias(grad_RO, of) if has_b_out else rows_RD.new_empty(0),
    )
