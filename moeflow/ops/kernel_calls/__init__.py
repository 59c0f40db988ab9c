"""One typed Python function for each CUDA kernel: checks the tensors, allocates the outputs, chooses the launch.

The kernels take fp32, bf16 and fp16, contiguous, and sum in fp32.  Nothing here waits for the device, except
`make_plan(exact=True)`, whose number of rows depends on the data.
"""

from moeflow.ops.kernel_calls.hidden import activation, activation_backward
from moeflow.ops.kernel_calls.routing import (
    Plan,
    gate_fits,
    gate_topk,
    gate_topk_backward,
    histogram,
    limit_by_capacity,
    make_plan,
    plan_fits,
    top_k,
)
from moeflow.ops.kernel_calls.rows import combine, combine_backward, dispatch, regroup

__all__ = [
    "Plan",
    "activation",
    "activation_backward",
    "combine",
    "combine_backward",
    "dispatch",
    "gate_fits",
    "gate_topk",
    "gate_topk_backward",
    "histogram",
    "limit_by_capacity",
    "make_plan",
    "plan_fits",
    "regroup",
    "top_k",
]
