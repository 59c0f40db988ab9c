"""Kernels of the routing: gate, top-k, histogram, plan, capacity.

Legend: T tokens, E experts, K top-k, R rows (dispatched choices).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moeflow.ops._cupy import CPP_NAME, Engine, KernelError
from moeflow.ops.kernel_calls.checks import FLOATS, INT64, THREADS, engine_for, require, require_int32

MAX_GATE_EXPERTS, MAX_TOP_K, MAX_EXPERTS = 512, 32, 1024
TILE = 2048  # choices of one block, as in kernels/plan.cu
_SCORE = {"identity": 0, "softmax": 1, "sigmoid": 2}
_WIDE = (torch.float32,)


class Plan(NamedTuple):
    """Destination of every choice, as `moeflow.ops.plan.DispatchPlan`, and where each expert's rows start.

    Attributes:
        tokens_per_expert_E: int64 [E].
        row_of_TK: int32 [T, K], -1 where the choice was dropped.
        slot_of_row_R: int32 [R], -1 where a row is padding.
        offsets: int32 [E + 1], first row of each expert; the last entry is the number of rows in use.
    """

    tokens_per_expert_E: Tensor
    row_of_TK: Tensor
    slot_of_row_R: Tensor
    offsets: Tensor


def _shape_of_lane(num_experts: int, *tensors: Tensor) -> tuple[int, int]:
    """(values moved at once, such moves of one lane), so that 32 lanes hold one row of E values."""
    width, size = 1, tensors[0].element_size()
    while 32 * width < num_experts and width < 16 // size:
        width *= 2
    aligned = all(tensor.data_ptr() % min(16, width * tensor.element_size()) == 0 for tensor in tensors)
    if num_experts % width or not aligned:
        width = 1
    vectors = 1
    while 32 * width * vectors < num_experts:
        vectors *= 2
    return width, vectors


def gate_fits(num_experts: int, k: int) -> bool:
    """Whether the gate's kernels take these sizes."""
    return num_experts <= MAX_GATE_EXPERTS and 1 <= k <= min(num_experts, MAX_TOP_K)


def plan_fits(num_experts: int) -> bool:
    """Whether the plan's kernels take this many experts."""
    return 1 <= num_experts <= MAX_EXPERTS


def _check_gate(num_experts: int, k: int) -> None:
    if not gate_fits(num_experts, k):
        raise KernelError(
            f"{num_experts} experts, {k} choices: the gate's kernel takes up to {MAX_GATE_EXPERTS} experts and 1 to "
            f"{MAX_TOP_K} choices, no more than there are experts",
            "MOEFLOW_OPS=torch",
        )


def _zero_counts(run: Engine, num_experts: int, device: torch.device) -> Tensor:
    return run.empty((num_experts,), dtype=torch.int64, device=device).zero_()


def _gate(
    values_TE: Tensor, k: int, score: str, normalize: bool, bias_E: Tensor | None, want_scores: bool, want_counts: bool
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    run = engine_for(values_TE)
    num_tokens, num_experts = values_TE.shape
    device = values_TE.device
    require("scores" if score == "identity" else "logits", values_TE, None, FLOATS, (None, None))
    _check_gate(num_experts, k)
    if bias_E is not None:
        require("bias", bias_E, values_TE, _WIDE, (num_experts,))
    weight_dtype = values_TE.dtype if score == "identity" else torch.float32
    scores_TE = run.empty((num_tokens, num_experts), dtype=torch.float32, device=device) if want_scores else None
    weights_TK = run.empty((num_tokens, k), dtype=weight_dtype, device=device)
    ids_TK = run.empty((num_tokens, k), dtype=torch.int64, device=device)
    counts_E = _zero_counts(run, num_experts, device) if want_counts else None
    if num_tokens == 0:
        return scores_TE, weights_TK, ids_TK, counts_E
    shape = _shape_of_lane(num_experts, values_TE, *(() if scores_TE is None else (scores_TE,)))
    run.launch(
        device,
        "gate",
        "gate_forward",
        (CPP_NAME[values_TE.dtype], *shape, _SCORE[score]),
        run.num_blocks(-(-num_tokens // (THREADS // 32)), device),
        (THREADS, 1),
        (
            values_TE,
            bias_E,
            scores_TE,
            weights_TK,
            ids_TK,
            counts_E,
            np.int64(num_tokens),
            np.int32(num_experts),
            np.int32(k),
            np.int32(normalize),
        ),
        shared=4 * num_experts,
    )
    return scores_TE, weights_TK, ids_TK, counts_E


def gate_topk(
    logits_TE: Tensor, k: int, score: str = "softmax", normalize: bool = False, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, choices and load of a gate in one pass over the logits.

    Args:
        logits_TE: [T, E].
        k: choices per token.
        score: "softmax" over all experts, or "sigmoid" of each.
        normalize: divide the weights of a token by their sum.
        bias_E: fp32 [E], added to the scores for the choice alone, or None.

    Returns:
        scores fp32 [T, E]; weights fp32 [T, K]; ids int64 [T, K], highest score first and the lowest id of equal ones;
        tokens per expert int64 [E].
    """
    scores_TE, weights_TK, ids_TK, counts_E = _gate(logits_TE, k, score, normalize, bias_E, True, True)
    assert scores_TE is not None and counts_E is not None
    return scores_TE, weights_TK, ids_TK, counts_E


def top_k(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores of each row in their dtype, and their ids int64; of equal ones the lowest id first."""
    _, values_TK, ids_TK, _ = _gate(scores_TE, k, "identity", False, None, False, False)
    return values_TK, ids_TK


def gate_topk_backward(
    grad_scores_TE: Tensor | None,
    grad_weights_TK: Tensor | None,
    scores_TE: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    score: str,
    normalize: bool,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Gradient of the logits [T, E], in `dtype`, from those of the scores and of the weights (either may be None)."""
    run = engine_for(scores_TE)
    (num_tokens, num_experts), k = scores_TE.shape, ids_TK.shape[1]
    require("scores", scores_TE, None, _WIDE, (None, None))
    require("weights", weights_TK, scores_TE, _WIDE, (num_tokens, k))
    require("ids", ids_TK, scores_TE, INT64, (num_tokens, k))
    for name, grad, shape in (
        ("grad_scores", grad_scores_TE, (num_tokens, num_experts)),
        ("grad_weights", grad_weights_TK, (num_tokens, k)),
    ):
        if grad is not None:
            require(name, grad, scores_TE, _WIDE, shape)
    _check_gate(num_experts, k)
    grad_logits_TE = run.empty((num_tokens, num_experts), dtype=dtype, device=scores_TE.device)
    if num_tokens == 0:
        return grad_logits_TE
    inputs = (scores_TE,) if grad_scores_TE is None else (scores_TE, grad_scores_TE)
    run.launch(
        scores_TE.device,
        "gate",
        "gate_backward",
        (CPP_NAME[dtype], *_shape_of_lane(num_experts, grad_logits_TE, *inputs), _SCORE[score]),
        run.num_blocks(-(-num_tokens // (THREADS // 32)), scores_TE.device),
        (THREADS, 1),
        (
            grad_scores_TE,
            grad_weights_TK,
            scores_TE,
            weights_TK,
            ids_TK,
            grad_logits_TE,
            np.int64(num_tokens),
            np.int32(num_experts),
            np.int32(k),
            np.int32(normalize),
        ),
    )
    return grad_logits_TE


def histogram(ids: Tensor, num_experts: int) -> Tensor:
    """Choices of each expert: int64 [E] from int64 ids of any shape; negative ones are not counted."""
    run = engine_for(ids)
    _check_experts(num_experts)
    require("ids", ids, None, INT64, (None,) * ids.dim())
    counts_E = _zero_counts(run, num_experts, ids.device)
    if ids.numel():
        run.launch(
            ids.device,
            "plan",
            "histogram",
            (),
            run.num_blocks(-(-ids.numel() // TILE), ids.device),
            (THREADS, 1),
            (ids, counts_E, np.int64(ids.numel()), np.int32(num_experts)),
            shared=4 * num_experts,
        )
    return counts_E


def _check_experts(num_experts: int) -> None:
    if not plan_fits(num_experts):
        raise KernelError(f"{num_experts} experts: the plan's kernels take 1 to {MAX_EXPERTS}", "MOEFLOW_OPS=torch")


def _order(
    run: Engine, ids_TK: Tensor, num_experts: int, choice_major: bool, pad: int, fixed_rows: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(first row of each expert in each tile, tokens per expert, offsets of experts)."""
    _check_experts(num_experts)
    require("ids", ids_TK, None, INT64, (None, None))
    require_int32(ids_TK.numel() + num_experts * (pad - 1))
    num_tokens, top_k = ids_TK.shape
    device, num_tiles = ids_TK.device, max(1, -(-ids_TK.numel() // TILE))
    tile_starts = run.empty((num_tiles, num_experts), dtype=torch.int32, device=device)
    counts_E = run.empty((num_experts,), dtype=torch.int64, device=device)
    offsets = run.empty((num_experts + 1,), dtype=torch.int32, device=device)
    run.launch(
        device,
        "plan",
        "count_choices",
        ("true" if choice_major else "false",),
        num_tiles,
        (THREADS, 1),
        (ids_TK, tile_starts, np.int64(num_tokens), np.int32(top_k), np.int32(num_experts)),
        shared=4 * num_experts,
    )
    columns = 1 << (num_experts - 1).bit_length()
    run.launch(
        device,
        "plan",
        "scan_tiles",
        (),
        1,
        (1024, 1),
        (
            tile_starts,
            counts_E,
            offsets,
            np.int32(num_tiles),
            np.int32(num_experts),
            np.int32(columns),
            np.int32(pad),
            np.int32(fixed_rows),
        ),
    )
    return tile_starts, counts_E, offsets


def _place(
    run: Engine,
    ids_TK: Tensor,
    num_experts: int,
    choice_major: bool,
    order: tuple[Tensor, Tensor, Tensor],
    maps: tuple[Tensor, Tensor] | None,
    kept_TK: Tensor | None,
    capacity: int,
) -> None:
    num_tokens, top_k = ids_TK.shape
    row_of_TK, slot_of_row_R = (None, None) if maps is None else maps
    run.launch(
        ids_TK.device,
        "plan",
        "place_choices",
        ("true" if choice_major else "false", "true" if maps is None else "false"),
        order[0].shape[0],
        (THREADS, 1),
        (
            ids_TK,
            *order,
            row_of_TK,
            slot_of_row_R,
            kept_TK,
            np.int64(num_tokens),
            np.int32(top_k),
            np.int32(num_experts),
            np.int64(0 if slot_of_row_R is None else slot_of_row_R.shape[0]),
            np.int64(capacity),
        ),
        shared=4 * num_experts * (THREADS // 32),
    )


def make_plan(
    ids_TK: Tensor,
    num_experts: int,
    exact: bool = False,
    pad: int = 1,
    capacity: int | None = None,
    choice_major: bool = False,
) -> Plan:
    """Order the choices by expert, and inside one expert by slot.

    Args:
        ids_TK: int64 [T, K], negative where the choice was dropped.
        num_experts: E.
        exact: cut slot_of_row to the rows in use, for which the host waits for the device.  Otherwise R is what the
            shape alone allows: T * K, plus E * (pad - 1); rows not in use have slot -1, at the end.
        pad: each expert's rows start at a multiple of this (for grouped matrix products).
        capacity: give each expert exactly so many rows, R = E * capacity; no expert may have more choices.
        choice_major: order inside one expert by choice first, then by token.
    """
    run = engine_for(ids_TK)
    order = _order(run, ids_TK, num_experts, choice_major, pad, capacity or 0)
    row_of_TK = run.empty(tuple(ids_TK.shape), dtype=torch.int32, device=ids_TK.device)
    num_rows = ids_TK.numel() + num_experts * (pad - 1) if capacity is None else num_experts * capacity
    slot_of_row_R = run.empty((num_rows,), dtype=torch.int32, device=ids_TK.device)
    _place(run, ids_TK, num_experts, choice_major, order, (row_of_TK, slot_of_row_R), None, 0)
    _, counts_E, offsets = order
    if exact:
        slot_of_row_R = slot_of_row_R[: int(offsets[-1])]
    return Plan(counts_E, row_of_TK, slot_of_row_R, offsets)


def limit_by_capacity(ids_TK: Tensor, num_experts: int, capacity: int, priority_TK: Tensor | None = None) -> Tensor:
    """Replace by -1 the choices that find their expert full.

    Args:
        ids_TK: int64 [T, K], negative where the choice was dropped already.
        num_experts: E.
        capacity: the most choices an expert keeps.
        priority_TK: fp32 [T, K]: the highest are kept.  None keeps those that come first, all first choices in token
            order before all second ones; equal priorities are decided in the same way.

    Returns:
        int64 [T, K].
    """
    run = engine_for(ids_TK)
    kept_TK = run.empty(tuple(ids_TK.shape), dtype=torch.int64, device=ids_TK.device)
    if priority_TK is None:
        order = _order(run, ids_TK, num_experts, True, 1)
        _place(run, ids_TK, num_experts, True, order, None, kept_TK, capacity)
        return kept_TK
    require("priority", priority_TK, ids_TK, _WIDE, tuple(ids_TK.shape))
    plan = make_plan(ids_TK, num_experts, choice_major=True)
    kept_TK.fill_(-1)
    if ids_TK.numel():
        run.launch(
            ids_TK.device,
            "plan",
            "keep_highest",
            (),
            num_experts,
            (THREADS, 1),
            (
                plan.slot_of_row_R,
                plan.tokens_per_expert_E,
                plan.offsets,
                priority_TK,
                kept_TK,
                np.int32(num_experts),
                np.int64(capacity),
            ),
        )
    return kept_TK
