"""Cutting a chain of layers into consecutive stages of even cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from moeflow.errors import ConfigError


def partition(costs: Sequence[float], parts: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Cut a chain of layers into `parts` consecutive pieces so that the dearest piece is as cheap as can be.

    Args:
        costs: of each layer, in any unit.
        parts: pieces; each gets at least one layer.
        first: cost that the first piece has beside its layers (an embedding).
        last: the same of the last piece (a projection to the vocabulary).

    Returns:
        Layers of each piece.  Among equally good cuts the one whose earlier pieces are longer.

    Raises:
        ConfigError: there are fewer layers than pieces.
    """
    n = len(costs)
    if parts > n:
        raise ConfigError(
            f"{parts} pipeline stages: the model has {n} layers, and each stage needs one", f"parallel.pp={n} at most"
        )
    prefix = [0.0, *accumulate(costs)]

    def piece(lo: int, hi: int, index: int) -> float:
        return prefix[hi] - prefix[lo] + (first if index == 0 else 0.0) + (last if index == parts - 1 else 0.0)

    # best[k][j]: least possible cost of the dearest of the first k pieces when they hold j layers.
    best = [[float("inf")] * (n + 1) for _ in range(parts + 1)]
    cut = [[0] * (n + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for k in range(1, parts + 1):
        for j in range(k, n + 1):
            for i in range(j - 1, k - 2, -1):
                dearest = max(best[k - 1][i], piece(i, j, k - 1))
                if dearest <= best[k][j]:
                    best[k][j], cut[k][j] = dearest, i
    sizes, end = [], n
    for k in range(parts, 0, -1):
        sizes.append(end - cut[k][end])
        end = cut[k][end]
    return sizes[::-1]
