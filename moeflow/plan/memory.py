"""Bytes that one rank holds in training, part by part.

Parameters, gradients and AdamW's moments are exact, as moeflow keeps them (fp32).  Activations are counted tensor by
tensor as autograd saves them (in the manner of Korthikanti et al., arXiv:2205.05198, section 4, without the scores
that fused attention does not keep).

Legend in comments: h d_model, n tokens of a micro-batch on the rank, K top_k.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from moeflow.plan.layouts import Candidate
from moeflow.plan.model_size import LayerSize, ModelSize
from moeflow.plan.profile import DTYPE_BYTES

FP32 = 4
_BUCKET_BYTES = 2 * 25 * 2**20


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank; `total` is their sum."""

    dense_parameters: int
    expert_parameters: int
    gradients: int
    optimizer: int
    half_copies: int
    activations: int
    logits: int
    exchange: int

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class StageHolding:
    """Parameters of one rank of a pipeline stage.

    Attributes:
        stage: number of the stage.
        layers: numbers of its blocks.
        dense: entries outside the experts, of one tp rank.
        experts: expert entries, of one ep and etp rank.
    """

    stage: int
    layers: tuple[int, ...]
    dense: int
    experts: int


def stage_holding(model: ModelSize, plan: Candidate, stage: int) -> StageHolding:
    """What one rank of a stage holds; with uneven cuts of the vocabulary, the rank that holds most."""
    first = sum(plan.split[:stage])
    numbers = tuple(range(first, first + plan.split[stage]))
    blocks = [model.layers[n] for n in numbers]
    vocabulary = -(-model.vocab_size // plan.tp) * model.d_model
    dense = sum(layer.cut // plan.tp + layer.whole for layer in blocks)
    last = stage == plan.pp - 1
    dense += vocabulary * ((stage == 0) + (last and not (model.tied and stage == 0)))
    dense += model.d_model if last else 0
    experts = sum(layer.num_experts // plan.ep * (layer.expert // plan.etp) for layer in blocks)
    return StageHolding(stage, numbers, dense, experts)


def memory_of(model: ModelSize, plan: Candidate, dtype: str, stage: int, imbalance: float = 1.0) -> Memory:
    """Bytes of a rank of one stage.

    Args:
        model: sizes.
        plan: layout, micro-batches, checkpointing.
        dtype: of the computation (`precision.dtype`).
        stage: pipeline stage.
        imbalance: rows of the busiest rank over the mean.
    """
    held = stage_holding(model, plan, stage)
    parameters = held.dense + held.experts
    tokens = plan.micro_batch * model.seq_len
    blocks = [model.layers[n] for n in held.layers]
    kept = [layer_bytes(model, layer, plan, dtype, tokens, imbalance) for layer in blocks]
    # 1F1B: stage s has up to pp - s micro-batches under way.
    in_flight = min(plan.pp - stage, plan.pipeline_batches)
    if plan.checkpointing:
        activations = in_flight * len(blocks) * tokens * model.d_model * FP32 + max(kept)
    else:
        activations = in_flight * sum(kept)
    if stage == 0:
        activations += in_flight * tokens * 8  # int64 tokens
    # Logits in fp32, their gradient, and the log-softmax that backward needs.
    logits = 3 * tokens * -(-model.vocab_size // plan.tp) * FP32 if stage == plan.pp - 1 else 0
    rows = max((_rows(model, layer, plan, tokens, imbalance) for layer in blocks), default=0)
    exchange = 2 * rows * model.d_model * DTYPE_BYTES[dtype] if plan.ep > 1 else 0
    return Memory(
        dense_parameters=held.dense * FP32,
        expert_parameters=held.experts * FP32,
        gradients=parameters * FP32,
        optimizer=2 * parameters * FP32,
        half_copies=parameters * 2 if dtype != "fp32" else 0,
        activations=int(activations),
        logits=logits,
        exchange=int(exchange) + (_BUCKET_BYTES if plan.world > 1 else 0),
    )


def _rows(model: ModelSize, layer: LayerSize, plan: Candidate, tokens: int, imbalance: float) -> int:
    """Rows of the busiest rank's experts."""
    if layer.num_experts == 0:
        return 0
    return int(tokens / plan.tp * min(model.top_k, layer.num_experts) * plan.etp * imbalance)


def layer_bytes(model: ModelSize, layer: LayerSize, plan: Candidate, dtype: str, tokens: int, imbalance: float) -> int:
    """Bytes of activations that one block keeps for one micro-batch, without checkpointing.

    Counted from what autograd saves, which a test repeats.  Where autocast is on, norms still keep fp32, and each
    product keeps its own copy of its input in the lower precision.
    """
    b, h, tp = DTYPE_BYTES[dtype], model.d_model, plan.tp
    own = tokens / tp
    half = dtype != "fp32"
    is_moe = layer.num_experts > 0
    # Input and result of both norms; queries, keys, values and what attention makes of them; the last projection's
    # input.
    kept = 4.0 * tokens * h * FP32 + tokens * layer.attention_width * b / tp + own * h * b
    if half:
        kept += 3 * tokens * h * b  # inputs of the projections to queries, keys and values
    if not is_moe:
        # gate, up, silu(gate), and their product
        kept += 4 * own * layer.d_hidden * b + (2 * tokens * h * b if half else 2 * tokens * h * FP32)
        return int(kept)
    rows, top_k = _rows(model, layer, plan, tokens, imbalance), min(model.top_k, layer.num_experts)
    kept += own * h * FP32 * (1 if half else 2)  # what the gate sees
    kept += own * (layer.num_experts + 8 * top_k) * FP32  # logits, weights, indices
    kept += rows * h * b + own * top_k * h * b  # rows as dispatched, and the experts' outputs
    kept += 2 * rows * (layer.d_hidden / plan.etp) * b  # gate and up; the rest is computed again
    if layer.shared_hidden:
        kept += 4 * own * layer.shared_hidden * b + (2 * own * h * b if half else 0)
    return int(kept)
