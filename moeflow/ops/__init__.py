"""The data movement and the arithmetic of one MoE layer, as torch custom operators.

Every operator has a plain PyTorch implementation (the reference, and what CPUs run), a fake one for `torch.compile` and
meta tensors, and its gradient.  On CUDA devices the same operators run this project's own kernels; which one an
operator uses, and why, is `moeflow.ops.backend.describe()`.

    gate         logits [T, E]            -> scores [T, E], weights, ids [T, K], choices per expert [E]
    top_k        scores [T, E]            -> values, ids [T, K]
    histogram    ids [T, K]               -> choices per expert [E]
    make_plan    ids [T, K]               -> DispatchPlan (where each choice's row stands)
    dispatch     x [T, D], plan           -> rows [R, D], ordered by expert
    grouped_mlp  rows [R, D], weights     -> rows [R, D]
    grouped_linear  rows [R, I], weights  -> rows [R, O]
    combine      rows [R, D], weights     -> y [T, D]
    regroup      rows [R, D], counts      -> rows [R, D], by expert instead of by source rank, or back
"""

from moeflow.ops.capacity import expert_capacity, limit_by_capacity
from moeflow.ops.gate import gate, is_fused
from moeflow.ops.grouped_linear import grouped_linear
from moeflow.ops.grouped_mlp import grouped_mlp
from moeflow.ops.permute import combine, dispatch
from moeflow.ops.plan import DispatchPlan, histogram, make_padded_plan, make_plan
from moeflow.ops.regroup import regroup
from moeflow.ops.topk import top_k

__all__ = [
    "DispatchPlan",
    "combine",
    "dispatch",
    "expert_capacity",
    "gate",
    "grouped_linear",
    "grouped_mlp",
    "histogram",
    "is_fused",
    "limit_by_capacity",
    "make_padded_plan",
    "make_plan",
    "regroup",
    "top_k",
]
