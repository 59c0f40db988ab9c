"""Causal self-attention, and the keys and values that generation keeps.

Legend: B sequences, S tokens of a sequence, D model, H heads, W width of a head, P tokens of the past and these.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeflow.models.linear import Linear
from moeflow.models.rotary import Rotary


class KeyValueCache:
    """Keys and values of the tokens that a model has already seen, so that each token is computed once.

    Args:
        capacity: tokens there is room for.

    Attributes:
        length: tokens seen.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self._layers: dict[str, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: str, k_BHSW: Tensor, v_BHSW: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of the next S tokens; return those of all tokens, [B, H, P, W].

        `length` moves on when all layers have done so (`advance`).
        """
        end = self.length + k_BHSW.shape[2]
        assert end <= self.capacity, f"{end} tokens in a cache of {self.capacity}"
        if layer not in self._layers:
            batch, heads, _, width = k_BHSW.shape
            shape = (batch, heads, self.capacity, width)
            self._layers[layer] = (k_BHSW.new_empty(shape), v_BHSW.new_empty(shape))
        keys, values = self._layers[layer]
        keys[:, :, self.length : end] = k_BHSW
        values[:, :, self.length : end] = v_BHSW
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, num_tokens: int) -> None:
        """Count tokens as seen."""
        self.length += num_tokens


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped queries (GQA, arXiv:2305.13245).

    The number of heads here follows from the width of the projections, so that a rank may hold some of the heads.

    Args:
        d_model: D.
        num_heads: H, heads of the queries.
        num_kv_heads: heads of the keys and values, each shared by num_heads / num_kv_heads queries.
        dropout: probability that an attention weight is dropped in training.
        init_std: standard deviation of the initial values.
        out_init_std: the same for the output projection.
    """

    def __init__(
        self, d_model: int, num_heads: int, num_kv_heads: int, dropout: float, init_std: float, out_init_std: float
    ):
        super().__init__()
        self.head_width = d_model // num_heads
        self.dropout = dropout
        self.q = Linear(d_model, d_model, init_std)
        self.k = Linear(d_model, num_kv_heads * self.head_width, init_std)
        self.v = Linear(d_model, num_kv_heads * self.head_width, init_std)
        self.out = Linear(d_model, d_model, out_init_std)

    def forward(
        self,
        x_BSD: Tensor,
        rotary: Rotary,
        cache: KeyValueCache | None = None,
        layer: str = "",
    ) -> Tensor:
        """Let each token attend to itself and those before it.

        Args:
            x_BSD: [B, S, D].
            rotary: positions of these tokens.
            cache: holds the tokens before these; these are added to it.
            layer: name of this layer in the cache.

        Returns:
            [B, S, D].
        """
        q_BHSW = rotary(self._heads(self.q(x_BSD)))
        k_BHPW = rotary(self._heads(self.k(x_BSD)))
        v_BHPW = self._heads(self.v(x_BSD))
        mask_SP, causal = None, True
        if cache is not None:
            k_BHPW, v_BHPW = cache.extend(layer, k_BHPW, v_BHPW)
            mask_SP, causal = self._mask(q_BHSW, cache.length)
        y_BHSW = functional.scaled_dot_product_attention(
            q_BHSW,
            k_BHPW,
            v_BHPW,
            attn_mask=mask_SP,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            enable_gqa=q_BHSW.shape[1] != k_BHPW.shape[1],
        )
        return self.out(y_BHSW.transpose(1, 2).flatten(2))

    def _heads(self, x_BSN: Tensor) -> Tensor:
        return x_BSN.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    @staticmethod
    def _mask(q_BHSW: Tensor, past: int) -> tuple[Tensor | None, bool]:
        """(mask, is_causal) of S tokens that follow `past` others: torch's own causal mask knows no past."""
        num_tokens = q_BHSW.shape[2]
        if past == 0 or num_tokens == 1:
            return None, past == 0
        ones = torch.ones(num_tokens, past + num_tokens, dtype=torch.bool, device=q_BHSW.device)
        return ones.tril(past), False
