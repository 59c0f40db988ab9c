"""Products of rows that are ordered by expert with one matrix for each expert: one kernel for all, or a loop.

Legend: R rows, I input width, O output width, E experts.

torch's grouped kernel reads where each expert's rows end from the device, so that the host never waits; a loop has to
know it.  Every product of the experts on a CUDA device passes through here, which is where a format with scales (fp8)
has to be put in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeflow.ops import backend

_ALIGNMENT = 16  # bytes, of pointers and of strides: the kernel's tiles are fetched by the tensor memory accelerator


@dataclass(frozen=True)
class Groups:
    """Which rows belong to which expert: on the device for the grouped kernel, on the host for the loop.

    Attributes:
        counts_E: int64 [E], rows of each expert.
        ends_E: int32 [E], row behind the last one of each expert; for the grouped kernel.
        bounds: (first row, last row + 1) of each expert; for the loop.
    """

    counts_E: Tensor
    ends_E: Tensor | None = None
    bounds: list[tuple[int, int]] | None = None


def use_grouped(rows_RI: Tensor, *weights_EOI: Tensor) -> bool:
    """Whether torch's grouped kernel takes these rows with the experts' matrices [E, O, I], forward and backward."""
    if rows_RI.device.type != "cuda" or rows_RI.dtype != torch.bfloat16 or rows_RI.shape[0] == 0:
        return False
    if backend.choose("grouped_mlp", "cuda")[0] != "grouped_mm":
        return False
    return is_aligned(rows_RI, 1) and all(is_aligned(weight_EOI, 2) for weight_EOI in weights_EOI)


def is_aligned(tensor: Tensor, num_dims: int) -> bool:
    """Whether the pointer, and rows of each of the last dimensions, are multiples of what is fetched at once."""
    sizes = tensor.shape[tensor.dim() - num_dims :]
    return tensor.data_ptr() % _ALIGNMENT == 0 and all(s * tensor.element_size() % _ALIGNMENT == 0 for s in sizes)


def groups(counts_E: Tensor, num_rows: int, grouped: bool) -> Groups:
    """Groups for one of the two ways; the loop's make the host wait for the device.

    Args:
        counts_E: int64 [E], sums to `num_rows`.
        num_rows: R.
        grouped: whether the grouped kernel is used.
    """
    ends_E = torch.cumsum(counts_E, 0)
    if grouped:
        return Groups(counts_E, ends_E=ends_E.to(torch.int32))
    ends = ends_E.tolist()
    assert ends[-1] == num_rows, f"tokens_per_expert sums to {ends[-1]}, but there are {num_rows} rows"
    return Groups(counts_E, bounds=list(zip([0, *ends[:-1]], ends, strict=True)))


def _grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    # The public name is newer than the least version of torch.
    function = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return function(a, b, offs=ends_E)


def linear(rows_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, of: Groups) -> Tensor:
    """Rows of expert e times weight[e]^T, plus bias[e]: [R, O]."""
    if of.ends_E is not None:
        out_RO = _grouped_mm(rows_RI, weight_EOI.transpose(1, 2), of.ends_E)
        if bias_EO is not None:
            out_RO += torch.repeat_interleave(bias_EO, of.counts_E, 0, output_size=rows_RI.shape[0])
        return out_RO
    assert of.bounds is not None
    out_RO = rows_RI.new_empty(rows_RI.shape[0], weight_EOI.shape[1])
    for e, (lo, hi) in enumerate(of.bounds):
        if bias_EO is None:
            torch.mm(rows_RI[lo:hi], weight_EOI[e].t(), out=out_RO[lo:hi])
        else:
            torch.addmm(bias_EO[e], rows_RI[lo:hi], weight_EOI[e].t(), out=out_RO[lo:hi])
    return out_RO


def grad_rows(grad_RO: Tensor, weight_EOI: Tensor, of: Groups) -> Tensor:
    """Gradient of `linear` with respect to the rows: [R, I]."""
    if of.ends_E is not None:
        return _grouped_mm(grad_RO, weight_EOI, of.ends_E)
    assert of.bounds is not None
    grad_RI = grad_RO.new_empty(grad_RO.shape[0], weight_EOI.shape[2])
    for e, (lo, hi) in enumerate(of.bounds):
        torch.mm(grad_RO[lo:hi], weight_EOI[e], out=grad_RI[lo:hi])
    return grad_RI


def grad_weight(grad_RO: Tensor, rows_RI: Tensor, of: Groups) -> Tensor:
    """Gradient of `linear` with respect to the weight: [E, O, I], zero for an expert without rows."""
    if of.ends_E is not None:
        grad_EOI = _grouped_mm(grad_RO.t(), rows_RI, of.ends_E)
        if not _zeroes_idle_experts(grad_RO.device):
            grad_EOI.masked_fill_((of.counts_E == 0)[:, None, None], 0)
        return grad_EOI
    assert of.bounds is not None
    grad_EOI = grad_RO.new_empty(len(of.bounds), grad_RO.shape[1], rows_RI.shape[1])
    for e, (lo, hi) in enumerate(of.bounds):
        # A product over no rows gives zeros: the gradient of an idle expert.
        torch.mm(grad_RO[lo:hi].t(), rows_RI[lo:hi], out=grad_EOI[e])
    return grad_EOI


def _zeroes_idle_experts(device: torch.device) -> bool:
    # Hopper's kernel writes a product over no rows as zeros; Blackwell's was reported to leave what the memory held
    # (pytorch/pytorch#172439).
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def grad_bias(grad_RO: Tensor, of: Groups) -> Tensor:
    """Gradient of `linear` with respect to the bias: [E, O], summed in the same order on every run."""
    if of.ends_E is not None:
        # A product with ones: index_add on CUDA adds in any order.
        ones_R8 = grad_RO.new_ones(grad_RO.shape[0], _ALIGNMENT // grad_RO.element_size())
        return grad_weight(ones_R8, grad_RO, of)[:, 0].contiguous()
    assert of.bounds is not None
    grad_EO = grad_RO.new_empty(len(of.bounds), grad_RO.shape[1])
    for e, (lo, hi) in enumerate(of.bounds):
        torch.sum(grad_RO[lo:hi], 0, out=grad_EO[e])
    return grad_EO
