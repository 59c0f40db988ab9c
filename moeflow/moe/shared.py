"""Experts that every token passes through, beside those that the gate picks.

Legend: T tokens, D model, F ffn, O output width.

Their parameters are ordinary dense ones: nothing of them is spread over expert-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moeflow.ops import activation as activations


class DenseMLP(nn.Module):
    """Two-layer MLP with the activations of the experts.

    Args:
        d_model: D.
        d_hidden: F.
        d_out: O; None takes d_model.
        activation: as of `MLPExperts`.
        bias: whether both layers have one.
    """

    def __init__(
        self, d_model: int, d_hidden: int, d_out: int | None = None, activation: str = "gelu", bias: bool = True
    ):
        super().__init__()
        self.activation = activations.check(activation)
        self.halves = 2 if activations.is_gated(activation) else 1
        self.fc_in = nn.Linear(d_model, self.halves * d_hidden, bias=bias)  # gate, then up
        self.fc_out = nn.Linear(d_hidden, d_model if d_out is None else d_out, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Map [T, D] to [T, O]."""
        hidden = self.fc_in(x_TD)
        if self.halves == 2:
            hidden = hidden.unflatten(1, (2, -1))
        return self.fc_out(activations.forward(self.activation, hidden))


class SharedExperts(nn.Module):
    """Adds an MLP of every token to the routed experts' output: y + mlp(x), or y + sigmoid(x w) mlp(x).

    Several shared experts of one width are one MLP of the summed width (DeepSeekMoE, arXiv:2401.06066, section 3.2);
    the sigmoid gate is Qwen2-MoE's.

    Args:
        mlp: maps [T, D] to [T, O].
        d_model: D, needed for the gate.
        gated: whether a sigmoid gate weighs the shared output.
    """

    def __init__(self, mlp: nn.Module, d_model: int, gated: bool = False):
        super().__init__()
        self.mlp = mlp
        self.gate = nn.Linear(d_model, 1, bias=False) if gated else None

    def forward(self, x_TD: Tensor, y_TO: Tensor) -> Tensor:
        """Return [T, O] from the tokens and the routed experts' output."""
        shared_TO = self.mlp(x_TD)
        if self.gate is not None:
            shared_TO = torch.sigmoid(self.gate(x_TD)) * shared_TO
        return y_TO + shared_TO


class ResidualExperts(nn.Module):
    """Mixes the routed experts' output with an MLP of every token by learned shares (PR-MoE, arXiv:2201.05596).

    y c_0 + mlp(x) c_1 with c = softmax(x W + b), as in DeepSpeed's residual MoE.

    Args:
        mlp: maps [T, D] to [T, O].
        d_model: D.
    """

    def __init__(self, mlp: nn.Module, d_model: int):
        super().__init__()
        self.mlp = mlp
        self.coefficient = nn.Linear(d_model, 2)

    def forward(self, x_TD: Tensor, y_TO: Tensor) -> Tensor:
        """Return [T, O] from the tokens and the routed experts' output."""
        share_T2 = torch.softmax(self.coefficient(x_TD), dim=1)
        return y_TO * share_T2[:, :1] + self.mlp(x_TD) * share_T2[:, 1:]
