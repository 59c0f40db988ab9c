"""Balance of the experts' load over the expert-parallel ranks, while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from moeflow.schema.fields import option


@dataclass(slots=True)
class BalanceConfig:
    """What is done about experts that get more rows than others."""

    shadow: bool = option(False, "bring hot experts to all ranks of their ep group for a step, where that is faster")
    placement: bool = option(False, "let experts change their rank, where the gain until the next decision pays for it")
    interval: int = option(100, "steps between decisions on placement", minimum=1)
    margin: float = option(0.03, "share of a layer's time that other shadows must gain", minimum=0.0, maximum=1.0)
    move_margin: float = option(1.2, "gain of a new placement over the price of the move", minimum=0.0)
    decay: float = option(0.9, "weight of the past in each step's forecast of loads", minimum=0.0, below=1.0)
    profile: Optional[str] = option(
        None, "file of measured coefficients of the cost model; null takes the device's defaults", path=True
    )
    fixed_shadows: Optional[List[int]] = option(
        None, "with shadow: these experts in every layer and step instead of the cost model's choice", minimum=0
    )

    @property
    def active(self) -> bool:
        """Whether anything is done at all."""
        return self.shadow or self.placement


@dataclass(slots=True)
class OverlapConfig:
    """How rows travel to their experts, and what is computed meanwhile."""

    chunks: str = option(
        "1", "parts of an exchange: the experts of one are computed while another travels; auto: by the cost model"
    )
    exchange: str = option(
        "flat",
        "a message for each rank, or inside the nodes first and then between them; auto: by the cost model",
        choices=("auto", "flat", "hierarchical"),
    )

    @property
    def active(self) -> bool:
        """Whether anything but the plain exchange may be used."""
        return self.chunks != "1" or self.exchange != "flat"
