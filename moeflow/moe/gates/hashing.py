"""Hash gate.

Legend: T tokens, D model, K top-k.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from moeflow.moe.gates.base import NO_CONTEXT, Gate, GateOutput, TokenContext

_PRIME = 2**31 - 1


class HashGate(Gate):
    """Experts by the token's id alone (Hash layers, Roller et al., arXiv:2106.04426): no parameters, no losses.

    A universal hash of the id, (a id + b) mod p, names the first expert and a stride that is coprime to the number of
    experts; the k-th expert is k strides on, so that the K experts of a token differ.  Weights are 1 / K.  The hash
    depends on `hash_seed` alone and is the same in every layer, as in the paper.

    Without token ids (`MoELayer.forward(x, token_ids=...)`) the position stands in for the id: within the sequence, or
    within this rank's micro-batch where tokens come in no sequences.
    """

    def build(self, d_model: int) -> None:
        draw = random.Random(f"hash gate {self.config.hash_seed}")
        self._factors = [(draw.randrange(1, _PRIME), draw.randrange(_PRIME)) for _ in range(2)]
        self._strides = [s for s in range(1, max(self.num_experts, 2)) if math.gcd(s, self.num_experts) == 1]

    def forward(self, x_TD: Tensor, context: TokenContext = NO_CONTEXT) -> GateOutput:
        keys_T = context.token_ids_T
        if keys_T is None:
            keys_T = torch.arange(x_TD.shape[0], device=x_TD.device) % (context.sequence_length or x_TD.shape[0] or 1)
        return self.fixed_output(self.experts_of(keys_T), x_TD.dtype, context)

    def needs_whole_sequences(self, context: TokenContext) -> bool:
        return context.token_ids_T is None

    def experts_of(self, keys_T: Tensor) -> Tensor:
        """Experts of token ids: int64 [T] -> int64 [T, K], distinct in each row."""
        first_T, second_T = ((a * (keys_T.long() % _PRIME) + b) % _PRIME for a, b in self._factors)
        stride_T = torch.tensor(self._strides, device=keys_T.device)[second_T % len(self._strides)]
        steps_K = torch.arange(self.top_k, device=keys_T.device)
        return (first_T[:, None] + steps_K * stride_T[:, None]) % self.num_experts
