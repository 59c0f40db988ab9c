"""Causal self-attention, and the keys and values that generation keeps.

Legend: B sequences, S tokens of a sequence, D model, H heads, W width of a head, P tokens of the past and these.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from moeflow.models.linear import Linear
from moeflow.models.regions import PARTIAL
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
            self._layers[layer] = (self._room(k_BHSW), self._room(v_BHSW))
        keys, values = self._layers[layer]
        keys[:, :, self.length : end] = k_BHSW
        values[:, :, self.length : end] = v_BHSW
        return keys[:, :, :end], values[:, :, :end]

    def _room(self, x_BHSW: Tensor) -> Tensor:
        batch, heads, _, width = x_BHSW.shape
        return x_BHSW.new_empty(batch, heads, self.capacity, width)

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
        head_width: W; None takes d_model / num_heads.
        bias: whether the projections to queries, keys and values have one.
        qk_norm: "none", or RMSNorm of queries and keys over each "head" or over "all" heads.
        norm_eps: of that norm.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        dropout: float,
        init_std: float,
        out_init_std: float,
        head_width: int | None = None,
        bias: bool = False,
        qk_norm: str = "none",
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        self.head_width = head_width or d_model // num_heads
        self.dropout = dropout
        q_width, kv_width = num_heads * self.head_width, num_kv_heads * self.head_width
        self.q = Linear(d_model, q_width, init_std, bias)
        self.k = Linear(d_model, kv_width, init_std, bias)
        self.v = Linear(d_model, kv_width, init_std, bias)
        self.out = Linear(q_width, d_model, out_init_std)
        self.q_norm: nn.RMSNorm | None = None
        self.k_norm: nn.RMSNorm | None = None
        self.norm_heads = qk_norm == "head"
        if qk_norm != "none":
            self.q_norm = nn.RMSNorm(self.head_width if self.norm_heads else q_width, eps=norm_eps)
            self.k_norm = nn.RMSNorm(self.head_width if self.norm_heads else kv_width, eps=norm_eps)
            for norm in (self.q_norm, self.k_norm):
                setattr(norm, PARTIAL, True)

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
        q_BHSW = rotary(self._heads(self.q(x_BSD), self.q_norm))
        k_BHSW = rotary(self._heads(self.k(x_BSD), self.k_norm))
        v_BHSW = self._heads(self.v(x_BSD), None)
        y_BHSW = attend(q_BHSW, k_BHSW, v_BHSW, self.dropout if self.training else 0.0, cache, layer)
        return self.out(y_BHSW.transpose(1, 2).flatten(2))

    def _heads(self, x_BSN: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        if norm is not None and not self.norm_heads:
            x_BSN = norm(x_BSN)
        x_BSHW = x_BSN.unflatten(-1, (-1, self.head_width))
        if norm is not None and self.norm_heads:
            x_BSHW = norm(x_BSHW)
        return x_BSHW.transpose(1, 2)


def attend(
    q_BHSW: Tensor, k_BHSW: Tensor, v_BHSW: Tensor, dropout: float, cache: KeyValueCache | None, layer: str
) -> Tensor:
    """Causal attention of S tokens to themselves and to those in the cache, which they are added to.

    Args:
        q_BHSW: queries.
        k_BHSW: keys; fewer heads where several queries share them.
        v_BHSW: values, of any width.
        dropout: probability of dropping an attention weight.
        cache: of the tokens before these.
        layer: name of this layer in the cache.

    Returns:
        [B, H, S, width of the values].
    """
    mask_SP, causal = None, True
    if cache is not None:
        k_BHSW, v_BHSW = cache.extend(layer, k_BHSW, v_BHSW)
        mask_SP, causal = _mask(q_BHSW, cache.length)
    return functional.scaled_dot_product_attention(
        q_BHSW,
        k_BHSW,
        v_BHSW,
        attn_mask=mask_SP,
        dropout_p=dropout,
        is_causal=causal,
        enable_gqa=q_BHSW.shape[1] != k_BHSW.shape[1],
    )


def _mask(q_BHSW: Tensor, past: int) -> tuple[Tensor | None, bool]:
    """(mask, is_causal) of S tokens that follow `past` others: torch's own causal mask knows no past."""
    num_tokens = q_BHSW.shape[2]
    if past == 0 or num_tokens == 1:
        return None, past == 0
    ones = torch.ones(num_tokens, past + num_tokens, dtype=torch.bool, device=q_BHSW.device)
    return ones.tril(past), False
