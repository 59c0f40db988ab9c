"""The k largest scores of each token, with ties decided the same way everywhere.

Legend: T tokens, E experts, K top-k.

torch.topk leaves the order of equal scores open, so that two devices, or two runs, may route a token differently.  Here
equal scores go to the lowest expert id.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moeflow.errors import ConfigError
from moeflow.ops import backend


def top_k(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores of each row, largest first; ties go to the lowest expert id.

    Args:
        scores_TE: [T, E], floating point.
        k: choices per token, 1 <= k <= E.

    Returns:
        values [T, K] in the dtype of the scores (differentiable), and ids [T, K] int64.

    Raises:
        ConfigError: k is out of range.
    """
    num_experts = scores_TE.shape[-1]
    if not 1 <= k <= num_experts:
        raise ConfigError(
            f"gate.top_k={k}: must be between 1 and the number of experts, {num_experts}",
            f"gate.top_k={min(max(k, 1), num_experts)}",
        )
    values_TK, ids_TK = _top_k(scores_TE, k)
    return values_TK, ids_TK


@torch.library.custom_op("moeflow::top_k", mutates_args=())
def _top_k(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if backend.use_cupy("top_k", scores_TE, scores_TE.shape[1], k):
        from moeflow.ops import kernel_calls

        return kernel_calls.top_k(scores_TE.contiguous(), k)
    # A chosen score becomes -inf; -inf scores of the input are lifted to the least finite value first, so that a
    # chosen expert is never chosen again.
    rest_TE = scores_TE.detach().clamp(min=torch.finfo(scores_TE.dtype).min)
    ids = []
    for _ in range(k):
        id_T1 = rest_TE.argmax(dim=1, keepdim=True)
        ids.append(id_T1)
        rest_TE = rest_TE.scatter(1, id_T1, float("-inf"))
    ids_TK = torch.cat(ids, dim=1)
    return scores_TE.gather(1, ids_TK), ids_TK


@_top_k.register_fake
def _(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (scores_TE.shape[0], k)
    return scores_TE.new_empty(shape), scores_TE.new_empty(shape, dtype=torch.int64)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    scores_TE, _ = inputs
    ctx.save_for_backward(output[1])
    ctx.num_experts = scores_TE.shape[1]


def _backward(ctx: Any, grad_values_TK: Tensor, grad_ids: Tensor | None) -> Any:
    (ids_TK,) = ctx.saved_tensors
    grad_TE = grad_values_TK.new_zeros(ids_TK.shape[0], ctx.num_experts)
    return grad_TE.scatter(1, ids_TK, grad_values_TK), None


_top_k.register_autograd(_backward, setup_context=_setup_context)
