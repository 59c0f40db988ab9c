"""The matrices of a Transformer: torch's own, drawn from normal(0, init_std)."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """y = x W^T + b, W [d_out, d_in].

    Args:
        d_in: width of the input.
        d_out: width of the output.
        init_std: standard deviation of the initial values.
        bias: whether there is a b, zero at the start.

    Attributes:
        drawn_as: name of the sibling module whose initial values this one gets too; None draws its own.
    """

    drawn_as: str | None = None

    def __init__(self, d_in: int, d_out: int, init_std: float, bias: bool = False):
        self.init_std = init_std  # torch draws while the module is made
        super().__init__(d_in, d_out, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the values from torch's default generator."""
        nn.init.normal_(self.weight, 0.0, self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """Row `token` of a matrix [vocab_size, d_model].

    Args:
        vocab_size: tokens there are.
        d_model: width of a row.
        init_std: standard deviation of the initial values.
    """

    def __init__(self, vocab_size: int, d_model: int, init_std: float):
        self.init_std = init_std
        super().__init__(vocab_size, d_model)

    def reset_parameters(self) -> None:
        """Draw the values from torch's default generator."""
        nn.init.normal_(self.weight, 0.0, self.init_std)
