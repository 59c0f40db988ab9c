"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Legend: B sequences, S tokens of a sequence, D model, H heads, N channels without position, R channels with position,
V channels of a value, C width of the latent.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeflow.models.attention import KeyValueCache, attend
from moeflow.models.linear import Linear
from moeflow.models.regions import PARTIAL
from moeflow.models.rotary import Rotary

# DeepSeek's norms of the latents have one of their own, whatever the model's is.
_EPS = 1e-6


class LatentAttention(nn.Module):
    """Keys and values of all heads are made from one narrow vector a token; positions turn channels of their own.

    The number of heads here follows from the width of the projections, so that a rank may hold some of the heads.
    Generation keeps whole keys and values, not the latents.

    Args:
        d_model: D.
        num_heads: H.
        q_rank: width that queries pass through; None projects them directly.
        kv_rank: C.
        nope_dim: N.
        rope_dim: R, shared by all heads on the side of the keys.
        value_dim: V.
        dropout: probability that an attention weight is dropped in training.
        init_std: standard deviation of the initial values.
        out_init_std: the same for the output projection.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        q_rank: int | None,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        dropout: float,
        init_std: float,
        out_init_std: float,
    ):
        super().__init__()
        self.nope_dim, self.rope_dim, self.value_dim, self.kv_rank = nope_dim, rope_dim, value_dim, kv_rank
        self.dropout = dropout
        self.q_down = Linear(d_model, q_rank, init_std) if q_rank is not None else None
        self.q_norm = nn.RMSNorm(q_rank, eps=_EPS) if q_rank is not None else None
        self.q = Linear(d_model if q_rank is None else q_rank, num_heads * (nope_dim + rope_dim), init_std)
        self.kv_down = Linear(d_model, kv_rank + rope_dim, init_std)
        self.kv_norm = nn.RMSNorm(kv_rank, eps=_EPS)
        self.kv = Linear(kv_rank, num_heads * (nope_dim + value_dim), init_std)
        self.out = Linear(num_heads * value_dim, d_model, out_init_std)
        for module in (self.q_down, self.q_norm, self.kv_down, self.kv_norm):
            if module is not None:
                setattr(module, PARTIAL, True)

    def forward(self, x_BSD: Tensor, rotary: Rotary, cache: KeyValueCache | None = None, layer: str = "") -> Tensor:
        """Let each token attend to itself and those before it; arguments as of `Attention`.  [B, S, D] -> [B, S, D]."""
        latent = x_BSD
        if self.q_down is not None and self.q_norm is not None:
            latent = self.q_norm(self.q_down(x_BSD))
        q_BHSN, q_BHSR = self._heads(self.q(latent)).split([self.nope_dim, self.rope_dim], dim=-1)
        c_BSC, k_BSR = self.kv_down(x_BSD).split([self.kv_rank, self.rope_dim], dim=-1)
        kv = self._heads(self.kv(self.kv_norm(c_BSC)), self.nope_dim + self.value_dim)
        k_BHSN, v_BHSV = kv.split([self.nope_dim, self.value_dim], dim=-1)
        k_BHSR = rotary(k_BSR.unsqueeze(1)).expand(-1, k_BHSN.shape[1], -1, -1)
        q = torch.cat((q_BHSN, rotary(q_BHSR)), dim=-1)
        k = torch.cat((k_BHSN, k_BHSR), dim=-1)
        y_BHSV = attend(q, k, v_BHSV, self.dropout if self.training else 0.0, cache, layer)
        return self.out(y_BHSV.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, width: int | None = None) -> Tensor:
        return x.unflatten(-1, (-1, width or self.nope_dim + self.rope_dim)).transpose(1, 2)
