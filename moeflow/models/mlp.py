"""Dense MLP with a gated activation.

Legend: D model, F ffn.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from moeflow.models.linear import Linear


class DenseMLP(nn.Module):
    """SwiGLU (arXiv:2002.05202, equation 6): down(silu(gate(x)) * up(x)).

    Args:
        d_model: D.
        d_hidden: F.
        init_std: standard deviation of the initial values.
        out_init_std: the same for `down`.
    """

    def __init__(self, d_model: int, d_hidden: int, init_std: float, out_init_std: float):
        super().__init__()
        self.gate = Linear(d_model, d_hidden, init_std)
        self.up = Linear(d_model, d_hidden, init_std)
        self.down = Linear(d_hidden, d_model, out_init_std)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))
