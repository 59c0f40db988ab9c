"""The arithmetic of a parallel layout: sizes, coordinates and groups of ranks.  No torch, no processes.

Two grids lie over the same ranks of one pipeline stage:

    dense part:  pp x dp x tp           world = pp * dp * tp
    experts:     pp x edp x ep x etp    dp * tp = edp * ep * etp

The last axis runs fastest.  So expert groups never leave a stage, and FastMoE's "MoE group = data x model parallel" is
etp=1, ep=dp*tp.

Example: world 8, pp 2, tp 2, ep 4.  Stage 0 is ranks 0-3 with tp {0,1} {2,3}, dp {0,2} {1,3}, ep {0,1,2,3}; stage 1 is
ranks 4-7 likewise; pp groups are {0,4} {1,5} {2,6} {3,7}.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeflow.errors import ConfigError

DENSE_AXES = ("pp", "dp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")
AXES = ("pp", "dp", "tp", "edp", "ep", "etp")


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes over `world` ranks.

    Raises:
        ConfigError: sizes do not divide; the message names the key and the values that would work.
    """

    world: int
    pp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        self._need(self.world, "launch.processes", "pp", self.pp)
        self._need(self.world // self.pp, "ranks of one pipeline stage", "tp", self.tp)
        self._need(self.stage, "ranks of one pipeline stage", "etp", self.etp)
        self._need(self.stage // self.etp, "ranks of one pipeline stage / etp", "ep", self.ep)

    @staticmethod
    def _need(total: int, of: str, key: str, value: int) -> None:
        if value < 1 or total % value:
            valid = divisors(total)
            shown = ", ".join(map(str, valid if len(valid) <= 12 else [*valid[:11], "..."]))
            raise ConfigError(
                f"parallel.{key}={value} does not divide the {of} ({total}); valid: {shown}",
                f"parallel.{key}={max(d for d in valid if d <= max(value, 1))}, or another launch.processes",
            )

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world // self.pp

    @property
    def dp(self) -> int:
        """Data-parallel size of the dense part."""
        return self.stage // self.tp

    @property
    def edp(self) -> int:
        """Data-parallel size of the experts."""
        return self.stage // (self.ep * self.etp)

    def size(self, axis: str) -> int:
        """Size of an axis of AXES."""
        return getattr(self, axis)

    def coordinate(self, rank: int, axis: str) -> int:
        """Where `rank` stands on an axis."""
        return rank // self._stride(axis) % self.size(axis)

    def group(self, rank: int, axis: str) -> range:
        """Ranks that differ from `rank` on this axis alone, ascending."""
        stride = self._stride(axis)
        first = rank - self.coordinate(rank, axis) * stride
        return range(first, first + stride * self.size(axis), stride)

    def groups(self, axis: str) -> list[range]:
        """All groups of an axis, by first rank."""
        return [self.group(rank, axis) for rank in range(self.world) if self.coordinate(rank, axis) == 0]

    def stage_group(self, rank: int) -> range:
        """All ranks of the pipeline stage of `rank`."""
        first = rank // self.stage * self.stage
        return range(first, first + self.stage)

    def _stride(self, axis: str) -> int:
        grid = DENSE_AXES if axis in DENSE_AXES else EXPERT_AXES
        stride = 1
        for faster in grid[grid.index(axis) + 1 :]:
            stride *= self.size(faster)
        return stride

    def describe(self) -> str:
        """One line for a run's banner, such as "pp 1 x dp 2 x tp 1, experts: edp 1 x ep 2 x etp 1"."""
        dense = " x ".join(f"{axis} {self.size(axis)}" for axis in DENSE_AXES)
        experts = " x ".join(f"{axis} {self.size(axis)}" for axis in EXPERT_AXES[1:])
        return f"{dense}; experts {experts}"
