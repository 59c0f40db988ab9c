"""Cosine router.

Legend: T tokens, D model, E experts, P projection.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeflow.moe.gates.base import Gate


class CosineGate(Gate):
    """Cosines between projected tokens and expert embeddings over a learned temperature (X-MoE, arXiv:2204.09179).

    logits = cos(W x, e_i) / tau (section 3.2), with tau bounded below as in Tutel.  The temperature is learned as
    log(1 / tau).
    """

    def build(self, d_model: int) -> None:
        config = self.config
        self.proj = nn.Linear(d_model, config.projection_dim, bias=config.bias)
        self.embedding_EP = nn.Parameter(torch.empty(self.num_experts, config.projection_dim))
        self.log_inverse_temperature = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the embeddings and set the temperature; the projection draws itself."""
        self.embedding_EP.normal_(0.0, 0.01)
        self.log_inverse_temperature.fill_(-math.log(self.config.init_temperature))

    def logits(self, x_TD: Tensor) -> Tensor:
        x_TP = self.linear(x_TD, self.proj)
        with torch.autocast(x_TD.device.type, enabled=False):
            embedding_EP = self.embedding_EP.to(x_TP.dtype)
            cosine_TE = functional.normalize(x_TP, dim=1) @ functional.normalize(embedding_EP, dim=1).t()
            limit = -math.log(self.config.min_temperature)
            return cosine_TE * self.log_inverse_temperature.clamp(max=limit).exp().to(x_TP.dtype)
