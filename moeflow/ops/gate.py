"""Scores of the experts, the choice among them, and their load: one pass over the logits, and one back.

Legend: T tokens, E experts, K top-k.

Example: logits [[0, 0, ln 2]] with k = 1 give scores [[0.25, 0.25, 0.5]], weights [[0.5]], ids [[2]], counts [0, 0, 1].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeflow.ops import backend
from moeflow.ops.plan import histogram
from moeflow.ops.topk import top_k


class Choice(NamedTuple):
    """What `gate` returns.

    Attributes:
        scores_TE: fp32 [T, E], softmax or sigmoid of the logits; differentiable.
        weights_TK: fp32 [T, K], scores of the chosen experts; differentiable.
        ids_TK: int64 [T, K], highest score first, of equal ones the lowest id.
        counts_E: int64 [E], choices of each expert.
    """

    scores_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    counts_E: Tensor


def is_fused(logits_TE: Tensor, k: int) -> bool:
    """Whether one kernel does it all; elsewhere the steps one by one are as fast, and take any dtype."""
    return logits_TE.dtype == torch.float32 and _on_kernels(logits_TE.device.type, logits_TE.shape[1], k)


@torch.compiler.assume_constant_result
def _on_kernels(device_type: str, num_experts: int, k: int) -> bool:
    if device_type != "cuda" or backend.choose("gate", "cuda")[0] != "cupy":
        return False
    from moeflow.ops import kernel_calls

    return kernel_calls.gate_fits(num_experts, k)


def gate(logits_TE: Tensor, k: int, score: str = "softmax", bias_E: Tensor | None = None) -> Choice:
    """Score the experts and choose the k best.

    Args:
        logits_TE: fp32 [T, E].
        k: choices per token.
        score: "softmax" over all experts, or "sigmoid" of each.
        bias_E: fp32 [E], added to the scores for the choice alone, without a gradient; or None.
    """
    return Choice(*_gate(logits_TE, k, score, bias_E))


@torch.library.custom_op("moeflow::gate", mutates_args=())
def _gate(logits_TE: Tensor, k: int, score: str, bias_E: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if backend.use_cupy("gate", logits_TE, logits_TE.shape[1], k):
        from moeflow.ops import kernel_calls

        return kernel_calls.gate_topk(logits_TE.contiguous(), k, score, bias_E=bias_E)
    scores_TE = torch.softmax(logits_TE, 1) if score == "softmax" else torch.sigmoid(logits_TE)
    _, ids_TK = top_k(scores_TE if bias_E is None else scores_TE + bias_E, k)
    return scores_TE, scores_TE.gather(1, ids_TK), ids_TK, histogram(ids_TK, logits_TE.shape[1])


@_gate.register_fake
def _(logits_TE: Tensor, k: int, score: str, bias_E: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits_TE.shape
    weights_TK = logits_TE.new_empty(num_tokens, k)
    ids_TK = logits_TE.new_empty(num_tokens, k, dtype=torch.int64)
    return torch.empty_like(logits_TE), weights_TK, ids_TK, ids_TK.new_empty(num_experts)


@torch.library.custom_op("moeflow::gate_backward", mutates_args=())
def _gate_backward(
    grad_TE: Tensor | None, grad_TK: Tensor | None, scores_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, score: str
) -> Tensor:
    if backend.use_cupy("gate", scores_TE, scores_TE.shape[1], ids_TK.shape[1]):
        from moeflow.ops import kernel_calls

        grad_TE = None if grad_TE is None else grad_TE.contiguous()
        grad_TK = None if grad_TK is None else grad_TK.contiguous()
        return kernel_calls.gate_topk_backward(grad_TE, grad_TK, scores_TE, weights_TK, ids_TK, score, False)
    total_TE = torch.zeros_like(scores_TE) if grad_TE is None else grad_TE
    if grad_TK is not None:
        total_TE = total_TE.scatter_add(1, ids_TK, grad_TK)
    if score == "sigmoid":
        return total_TE * scores_TE * (1 - scores_TE)
    return scores_TE * (total_TE - (total_TE * scores_TE).sum(1, keepdim=True))


@_gate_backward.register_fake
def _(
    grad_TE: Tensor | None, grad_TK: Tensor | None, scores_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, score: str
) -> Tensor:
    return torch.empty_like(scores_TE)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, ctx.score, _ = inputs
    ctx.save_for_backward(*output[:3])
    # Where no loss reads the scores, their gradient is not read either: half of the bytes.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_TE: Tensor | None, grad_TK: Tensor | None, grad_ids: Any, grad_counts: Any) -> Any:
    if grad_TE is None and grad_TK is None:
        return None, None, None, None
    return _gate_backward(grad_TE, grad_TK, *ctx.saved_tensors, ctx.score), None, None, None


_gate.register_autograd(_backward, setup_context=_setup_context)
