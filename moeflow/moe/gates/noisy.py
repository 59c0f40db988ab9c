"""Noisy top-k gate.

Legend: T tokens, D model, E experts, K top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeflow import ops
from moeflow.moe import losses
from moeflow.moe.gates.base import Gate, GateOutput, TokenContext
from moeflow.schema.gate import NoisyGateConfig


class NoisyGate(Gate):
    """Noisy top-k gating (Shazeer et al., arXiv:1701.06538, equations 3 to 5 and appendix A).

    In training each logit gets Gaussian noise of a learned size softplus(x W_noise) + 0.01; weights are a softmax over
    the k largest noisy logits.  Losses: CV^2 of the summed weights (importance) and CV^2 of the smooth load estimate,
    the sum over tokens of the probability that the expert would be chosen if its noise were drawn again.  Without
    noise (in evaluation) it is the naive gate.
    """

    NOISE_EPSILON = 1e-2

    def __init__(self, d_model: int, num_experts: int, config: NoisyGateConfig):
        super().__init__(d_model, num_experts, config)
        self.noise = nn.Linear(d_model, num_experts, bias=False)

    def forward(self, x_TD: Tensor, context: TokenContext = TokenContext()) -> GateOutput:  # noqa: B008 (frozen)
        if not self.training:
            return super().forward(x_TD, context)
        clean_TE = self.logits(x_TD)
        with torch.autocast(x_TD.device.type, enabled=False):
            raw_TE = nn.functional.linear(x_TD.float(), self.noise.weight.float())
        std_TE = nn.functional.softplus(raw_TE) + self.NOISE_EPSILON
        noisy_TE = clean_TE + torch.randn_like(clean_TE) * std_TE
        probs_TE = torch.softmax(noisy_TE, dim=1)
        ids_TK, weights_TK = self.choose(noisy_TE, probs_TE)
        aux = self.aux_losses(noisy_TE, probs_TE, ids_TK, weights_TK, context)
        aux["importance"] = (self.config.importance_coef, self._importance_loss(ids_TK, weights_TK))
        aux["load"] = (self.config.load_coef, self._load_loss(clean_TE, noisy_TE, std_TE))
        return GateOutput(ids_TK, weights_TK, probs_TE, aux)

    def _importance_loss(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        total_E = weights_TK.new_zeros(self.num_experts).scatter_add(0, ids_TK.reshape(-1), weights_TK.reshape(-1))
        return losses.squared_variation(self.batch_mean(total_E))

    def _load_loss(self, clean_TE: Tensor, noisy_TE: Tensor, std_TE: Tensor) -> Tensor:
        if self.top_k == self.num_experts:
            return clean_TE.new_zeros(())  # every expert is always chosen: the load cannot vary
        top_T, _ = ops.top_k(noisy_TE, self.top_k + 1)
        # An expert among the chosen has to beat the (k+1)-th score, one outside the k-th.
        chosen_TE = noisy_TE > top_T[:, self.top_k :]
        threshold_TE = torch.where(chosen_TE, top_T[:, self.top_k :], top_T[:, self.top_k - 1 : self.top_k])
        load_E = torch.special.ndtr((clean_TE - threshold_TE) / std_TE).sum(0)
        return losses.squared_variation(self.batch_mean(load_E))
