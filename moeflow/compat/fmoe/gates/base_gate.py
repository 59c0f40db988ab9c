"""What FastMoE's gates share: the number of experts, and a loss that the user fetches."""

from __future__ import annotations

from torch import Tensor, nn


class BaseGate(nn.Module):
    """Base of FastMoE's gates, and of a user's own.

    A gate maps tokens [N, d_model] to (expert ids [N, top_k], -1 for a dropped choice; scores [N, top_k]).

    Args:
        num_expert: experts on this worker.
        world_size: workers that the experts are spread over.
    """

    def __init__(self, num_expert: int, world_size: int):
        super().__init__()
        self.num_expert, self.world_size = num_expert, world_size
        self.tot_expert = num_expert * world_size
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route tokens."""
        raise NotImplementedError("Base gate cannot be directly used for fwd")

    def set_loss(self, loss: Tensor) -> None:
        """Keep the loss of this forward pass; the user adds it to the objective."""
        self.loss = loss

    def get_loss(self, clear: bool = True) -> Tensor | None:
        """The loss of the latest forward pass, and forget it."""
        loss = self.loss
        if clear:
            self.loss = None
        return loss

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss to fetch."""
        return self.loss is not None
