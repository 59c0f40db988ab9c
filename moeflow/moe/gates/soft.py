"""Soft MoE.

Legend: T tokens, D model, E experts, B sequences, S tokens of a sequence, P slots of an expert, M = E * P slots,
R = E * B * P rows, O output width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeflow.moe.gates.base import NO_CONTEXT, Gate, TokenContext


@dataclass(frozen=True)
class SoftOutput:
    """What the soft gate decided: weighted means instead of choices.

    Attributes:
        dispatch_BSM: share of each token in each slot; sums to 1 over the tokens of a sequence.
        combine_BSM: share of each slot in each token's output; sums to 1 over the slots.
        num_experts: E.
        losses: name -> (coefficient, loss); none.
    """

    dispatch_BSM: Tensor
    combine_BSM: Tensor
    num_experts: int
    losses: dict[str, tuple[float, Tensor]] = field(default_factory=dict)

    def rows(self, x_TD: Tensor) -> Tensor:
        """The experts' inputs, ordered by expert, the same number for each: [R, D]."""
        num_sequences, length, _ = self.dispatch_BSM.shape
        x_BSD = x_TD.view(num_sequences, length, x_TD.shape[1])
        slots_BMD = self.dispatch_BSM.to(x_TD.dtype).transpose(1, 2) @ x_BSD
        slots_BEPD = slots_BMD.unflatten(1, (self.num_experts, slots_BMD.shape[1] // self.num_experts))
        return slots_BEPD.transpose(0, 1).flatten(0, 2)

    def merge(self, rows_RO: Tensor) -> Tensor:
        """The tokens' outputs: [T, O]."""
        num_sequences, _, num_slots = self.combine_BSM.shape
        width = rows_RO.shape[1]
        rows_EBPO = rows_RO.view(self.num_experts, num_sequences, num_slots // self.num_experts, width)
        slots_BMO = rows_EBPO.transpose(0, 1).reshape(num_sequences, num_slots, width)
        return (self.combine_BSM.to(rows_RO.dtype) @ slots_BMO).flatten(0, 1)


class SoftGate(Gate):
    """Experts work on weighted means of a sequence's tokens (Puigcerver et al., arXiv:2308.00951, section 2.1).

    With logits L = x Phi of tokens against slots: a slot's input is the mean of the tokens weighted by the softmax of L
    over the tokens, a token's output the mean of the slots weighted by the softmax over the slots.  Tokens and slots
    are normalized, and scaled by a learned factor (section 2.3).

    A sequence (an image) is the unit of mixing; tokens that come in no sequences are one.  Every expert has the same
    number of rows, so nothing is dropped and shapes are static.
    """

    def build(self, d_model: int) -> None:
        num_slots = self.num_experts * self.config.slots_per_expert
        self.slots_MD = nn.Parameter(torch.empty(num_slots, d_model))
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the slots as LeCun's normal does; the scale starts at 1."""
        self.slots_MD.normal_(0.0, self.slots_MD.shape[1] ** -0.5)
        self.scale.fill_(1.0)

    def needs_whole_sequences(self, context: TokenContext) -> bool:
        return True

    def logits(self, x_TD: Tensor) -> Tensor:
        """[T, M]."""
        dtype = torch.float32 if self.config.fp32 else x_TD.dtype
        with torch.autocast(x_TD.device.type, enabled=not self.config.fp32):
            slots_MD = self.scale.to(dtype) * functional.normalize(self.slots_MD.to(dtype), dim=1)
            return functional.normalize(x_TD.to(dtype), dim=1) @ slots_MD.t()

    def forward(self, x_TD: Tensor, context: TokenContext = NO_CONTEXT) -> SoftOutput:  # type: ignore[override]
        logits_TM = self.logits(x_TD)
        length = context.sequence_length or x_TD.shape[0]
        num_sequences = x_TD.shape[0] // length if length else 1
        logits_BSM = logits_TM.view(num_sequences, length, logits_TM.shape[1])
        combine_BSM = torch.softmax(logits_BSM, dim=2)
        if context.valid_T is None:
            return SoftOutput(torch.softmax(logits_BSM, dim=1), combine_BSM, self.num_experts)
        valid_BS1 = context.valid_T.view(num_sequences, length, 1)
        lowest = torch.finfo(logits_BSM.dtype).min
        dispatch_BSM = torch.softmax(logits_BSM.masked_fill(~valid_BS1, lowest), dim=1) * valid_BS1
        return SoftOutput(dispatch_BSM, combine_BSM, self.num_experts)
