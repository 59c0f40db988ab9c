"""Where each choice of each token goes: a stable counting sort of the choices by expert.

Legend: T tokens, E experts, K top-k, R rows (dispatched choices), slot = t * K + k.

Example: ids [[1, 0], [0, -1]] with 2 experts gives tokens_per_expert [2, 1], row_of [[2, 0], [1, -1]] and
slot_of_row [1, 2, 0]: expert 0 takes slots 1 and 2 (token 0's second choice, token 1's first), expert 1 takes slot 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.ops import backend


@dataclass(frozen=True)
class DispatchPlan:
    """Destination of every choice.

    Attributes:
        tokens_per_expert_E: int64 [E], rows of each expert.
        row_of_TK: int32 [T, K], row of each choice, -1 where it was dropped.
        slot_of_row_R: int32 [R], slot t * K + k of each row, -1 for a row that pads its expert's segment; rows are
            ordered by expert, then by slot, and padding stands last in each segment.
        padded: whether there may be padding rows.  They are zero after dispatch, and combine ignores them.
    """

    tokens_per_expert_E: Tensor
    row_of_TK: Tensor
    slot_of_row_R: Tensor
    padded: bool = False


def histogram(ids: Tensor, num_experts: int) -> Tensor:
    """Count the choices of each expert.

    Args:
        ids: integer tensor of any shape; negative entries are not counted.
        num_experts: E; entries must be below it.

    Returns:
        int64 [E].
    """
    return _histogram(ids, num_experts)


def make_plan(ids_TK: Tensor, num_experts: int, may_drop: bool = True) -> DispatchPlan:
    """Order the choices by expert, keeping the order of tokens inside one expert.

    Args:
        ids_TK: integer [T, K], expert of each choice; negative where the choice was dropped.
        num_experts: E.
        may_drop: False promises that no entry is negative, so that R = T * K is known without looking at the data.
    """
    return DispatchPlan(*_make_plan(ids_TK, num_experts, may_drop))


def make_padded_plan(ids_TK: Tensor, num_experts: int, capacity: int) -> DispatchPlan:
    """Like `make_plan`, with exactly `capacity` rows for every expert, so that no shape depends on the data.

    Args:
        ids_TK: integer [T, K], negative where a choice was dropped; no expert may be named more than `capacity` times.
        num_experts: E.
        capacity: C; R = E * C.
    """
    row_of_TK, slot_of_row_R = _make_padded_plan(ids_TK, num_experts, capacity)
    counts_E = torch.full((num_experts,), capacity, dtype=torch.int64, device=ids_TK.device)
    return DispatchPlan(counts_E, row_of_TK, slot_of_row_R, padded=True)


@torch.library.custom_op("moeflow::make_padded_plan", mutates_args=())
def _make_padded_plan(ids_TK: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    if capacity > 0 and backend.use_cupy("make_plan", ids_TK, num_experts):
        from moeflow.ops import kernel_calls

        made = kernel_calls.make_plan(ids_TK.to(torch.int64).contiguous(), num_experts, capacity=capacity)
        return made.row_of_TK, made.slot_of_row_R
    bin_N = torch.where(ids_TK < 0, num_experts, ids_TK).reshape(-1).to(torch.int64)
    slots_N = torch.argsort(bin_N, stable=True)
    sorted_N = bin_N[slots_N]
    counts_E = _histogram(ids_TK, num_experts)
    first_E = torch.cumsum(counts_E, 0) - counts_E
    # Row of the choices in sorted order; those that were dropped land on row E * C, which is cut off.
    position_N = torch.arange(slots_N.numel(), device=ids_TK.device)
    shift_E = torch.arange(num_experts, device=ids_TK.device) * capacity - first_E
    num_rows = num_experts * capacity
    padding = torch.zeros(1, dtype=torch.int64, device=ids_TK.device)
    row_N = torch.where(sorted_N < num_experts, position_N + torch.cat([shift_E, padding])[sorted_N], num_rows)
    slot_of_row_R = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=ids_TK.device)
    slot_of_row_R[row_N] = slots_N.to(torch.int32)
    row_of_N = torch.empty(slots_N.numel(), dtype=torch.int32, device=ids_TK.device)
    row_of_N[slots_N] = torch.where(row_N < num_rows, row_N, -1).to(torch.int32)
    return row_of_N.view_as(ids_TK), slot_of_row_R[:num_rows].clone()


@_make_padded_plan.register_fake
def _(ids_TK: Tensor, num_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    row_of_TK = ids_TK.new_empty(ids_TK.shape, dtype=torch.int32)
    return row_of_TK, ids_TK.new_empty(num_experts * capacity, dtype=torch.int32)


@torch.library.custom_op("moeflow::histogram", mutates_args=())
def _histogram(ids: Tensor, num_experts: int) -> Tensor:
    if backend.use_cupy("histogram", ids, num_experts):
        from moeflow.ops import kernel_calls

        return kernel_calls.histogram(ids.to(torch.int64).contiguous(), num_experts)
    # Dropped choices are counted in one bin more, which is cut off: no boolean mask, hence no wait for the device.
    ids_N = torch.where(ids < 0, num_experts, ids).reshape(-1).to(torch.int64)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids_N, torch.ones_like(ids_N))[:num_experts].clone()


@_histogram.register_fake
def _(ids: Tensor, num_experts: int) -> Tensor:
    return ids.new_empty(num_experts, dtype=torch.int64)


@torch.library.custom_op("moeflow::make_plan", mutates_args=())
def _make_plan(ids_TK: Tensor, num_experts: int, may_drop: bool) -> tuple[Tensor, Tensor, Tensor]:
    if backend.use_cupy("make_plan", ids_TK, num_experts):
        from moeflow.ops import kernel_calls

        return kernel_calls.make_plan(ids_TK.to(torch.int64).contiguous(), num_experts, exact=may_drop)[:3]
    tokens_per_expert_E = _histogram(ids_TK, num_experts)
    ids_N = ids_TK.reshape(-1)
    num_rows = ids_N.numel()
    if may_drop:
        ids_N = torch.where(ids_N < 0, num_experts, ids_N)
        num_rows = int(tokens_per_expert_E.sum())
    slots_N = torch.argsort(ids_N, stable=True)
    row_of_N = torch.empty(ids_N.numel(), dtype=torch.int32, device=ids_TK.device)
    row_of_N[slots_N] = torch.arange(ids_N.numel(), dtype=torch.int32, device=ids_TK.device)
    if may_drop:
        row_of_N.masked_fill_(ids_N == num_experts, -1)
    return tokens_per_expert_E, row_of_N.view_as(ids_TK), slots_N[:num_rows].to(torch.int32)


@_make_plan.register_fake
def _(ids_TK: Tensor, num_experts: int, may_drop: bool) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = torch.library.get_ctx().new_dynamic_size() if may_drop else ids_TK.numel()
    return (
        ids_TK.new_empty(num_experts, dtype=torch.int64),
        ids_TK.new_empty(ids_TK.shape, dtype=torch.int32),
        ids_TK.new_empty(num_rows, dtype=torch.int32),
    )
