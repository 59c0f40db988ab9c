"""Rotary positions (RoFormer, arXiv:2104.09864, section 3.2.2), with the halves of a head as the rotated pairs.

Legend: B sequences, S tokens of a sequence, H heads, W width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """Turns queries and keys by angles that grow with their positions.

    Made anew for each forward pass, in which all layers share the cosines and sines.  So a model has no buffer that
    could be lost when it is built on the meta device, cut into stages or moved.

    Args:
        start: position of the first token.
        theta: base of the frequencies: channel pair i turns by position * theta^(-2i / W).
    """

    def __init__(self, start: int, theta: float):
        self.start, self.theta = start, theta
        self._cos_sin: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, x_BHSW: Tensor) -> Tensor:
        """Turn each pair (x_i, x_{i + W/2}); computed in fp32, returned in x's dtype.

        Args:
            x_BHSW: [..., S, W], W even.
        """
        cos_SN, sin_SN = self._angles(x_BHSW.shape[-2], x_BHSW.shape[-1], x_BHSW.device)
        first, second = x_BHSW.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos_SN - second * sin_SN, second * cos_SN + first * sin_SN), dim=-1)
        return turned.to(x_BHSW.dtype)

    def _angles(self, length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if (length, width) not in self._cos_sin:
            frequencies_N = self.theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
            positions_S = torch.arange(self.start, self.start + length, dtype=torch.float32, device=device)
            angles_SN = torch.outer(positions_S, frequencies_N)
            self._cos_sin[length, width] = (angles_SN.cos(), angles_SN.sin())
        return self._cos_sin[length, width]
