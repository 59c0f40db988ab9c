"""Noisy top-k gate.

Legend: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from moeflow import ops
from moeflow.moe import losses
from moeflow.moe.gates.base import NO_CONTEXT, Gate, GateOutput, TokenContext


class NoisyGate(Gate):
    """Noisy top-k gating (Shazeer et al., arXiv:1701.06538, equations 3 to 5 and appendix A).

    In training each logit gets Gaussian noise of a learned size softplus(x W_noise) + 0.01; weights are a softmax over
    the k largest noisy logits.  Losses: CV^2 of the summed weights (importance) and CV^2 of the smooth load estimate,
    the sum over tokens of the probability that the expert would be chosen if its noise were drawn again.  Without
    noise (in evaluation) it is the naive gate.
    """

    NOISE_EPSILON = 1e-2

    def build(self, d_model: int) -> None:
        super().build(d_model)
        self.noise = nn.Linear(d_model, self.num_experts, bias=False)

    def forward(self, x_TD: Tensor, context: TokenContext = NO_CONTEXT) -> GateOutput:
        if not self.training:
            return super().forward(x_TD, context)
        clean_TE = self.logits(x_TD)
        std_TE = nn.functional.softplus(self.linear(x_TD, self.noise)) + self.NOISE_EPSILON
        noisy_TE = clean_TE + torch.randn_like(clean_TE) * std_TE
        scores_TE, ids_TK, weights_TK, counts_E = self.route(noisy_TE, context)
        out = self.output(noisy_TE, scores_TE, ids_TK, weights_TK, context, counts_E)
        valid_T1 = 1.0 if context.valid_T is None else context.valid_T[:, None]
        aux = {
            **out.losses,
            "importance": (self.config.importance_coef, self._importance_loss(ids_TK, out.weights_TK * valid_T1)),
            "load": (self.config.load_coef, self._load_loss(clean_TE, noisy_TE, std_TE, valid_T1)),
        }
        return replace(out, losses=aux)

    def _importance_loss(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        total_E = weights_TK.new_zeros(self.num_experts).scatter_add(0, ids_TK.reshape(-1), weights_TK.reshape(-1))
        return losses.squared_variation(self.batch_mean(total_E))

    def _load_loss(self, clean_TE: Tensor, noisy_TE: Tensor, std_TE: Tensor, valid_T1: Tensor | float) -> Tensor:
        if self.top_k == self.num_experts:
            return clean_TE.new_zeros(())  # every expert is always chosen: the load cannot vary
        top_T, _ = ops.top_k(noisy_TE, self.top_k + 1)
        # An expert among the chosen has to beat the (k+1)-th score, one outside the k-th.
        chosen_TE = noisy_TE > top_T[:, self.top_k :]
        threshold_TE = torch.where(chosen_TE, top_T[:, self.top_k :], top_T[:, self.top_k - 1 : self.top_k])
        load_E = (torch.special.ndtr((clean_TE - threshold_TE) / std_TE) * valid_T1).sum(0)
        return losses.squared_variation(self.batch_mean(load_E))
