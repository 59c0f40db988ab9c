"""What the live view shows, as lines of text: progress, curves, loads of the experts (drawn here in ASCII).

    step 120/1000  ======>---------------------------------------  12%  eta 12:34
    loss 1.2345  acc 45.1%  lr 9.9e-04  1,234 samples/s
    loss          #*+==--::...  2.378 .. 1.234
    accuracy      ..::--==+*##  0.07 .. 0.451
    blocks.5.mlp  =+:#-=:+      busiest 2.1x the mean
    blocks.7.mlp  =+.#-=:+      busiest 2.3x the mean, dead: 2

Nothing here knows of a terminal: width, height and whether it has more than ASCII are given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

Loads = Mapping[str, Sequence[int]]

#: Figures that have a curve, where a run has them.
CURVES = ("loss", "accuracy", "perplexity", "eval/accuracy", "eval/perplexity", "eval/loss")
_MOST_POINTS = 512
_LABEL = 17
_NARROWEST_CURVE = 8
_ROOM_FOR_DEAD = 28


@dataclass(frozen=True, slots=True)
class Signs:
    """What a terminal can show."""

    ramp: str
    done: str
    tip: str
    left: str
    dead: str
    odd: str
    cut: str


BLOCKS = Signs(
    "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588", "\u2501", "\u2578", "\u2500", "\u00b7", "!", "\u2026"
)
ASCII = Signs("_.-:=+*#", "=", ">", "-", ".", "!", "~")


class Curve:
    """Points of one figure, thinned out to pairs' means when there are too many."""

    def __init__(self, most: int = _MOST_POINTS):
        self._most = most
        self._merged = 1  # points in each entry
        self._pending: list[float] = []
        self._entries: list[float] = []
        self.first: float | None = None
        self.last: float | None = None

    def add(self, value: float) -> None:
        """Add the next point."""
        self.first = value if self.first is None else self.first
        self.last = value
        self._pending.append(value)
        if len(self._pending) == self._merged:
            self._entries.append(_mean(self._pending))
            self._pending = []
        if len(self._entries) == self._most:
            self._entries = [_mean(self._entries[at : at + 2]) for at in range(0, self._most, 2)]
            self._merged *= 2

    def points(self) -> list[float]:
        """The curve, oldest first."""
        return [*self._entries, _mean(self._pending)] if self._pending else list(self._entries)


class View:
    """Collects what comes and makes lines of it.

    Args:
        total_steps: last step of the run.
    """

    def __init__(self, total_steps: int):
        self.total_steps = total_steps
        self.curves: dict[str, Curve] = {}
        self.loads: Loads = {}

    def add(self, row: Mapping[str, Any], loads: Loads | None = None) -> None:
        """Take the figures of a logged step or of an evaluation."""
        for key in CURVES:
            if isinstance(row.get(key), (int, float)):
                self.curves.setdefault(key, Curve()).add(float(row[key]))
        self.loads = loads or self.loads

    def lines(self, step: int, metrics: str, eta: str, width: int, height: int, signs: Signs = BLOCKS) -> list[Text]:
        """Return what fits.

        Args:
            step: that is done.
            metrics: the figures as text.
            eta: the time that is left, or "".
            width: columns that a line may take.
            height: lines that may be taken, at least 1.
            signs: of the terminal.
        """
        lines = [self._progress(step, eta, width, signs)]
        if height < 2:
            return lines
        lines.append(Text(metrics))
        curves = [(key, curve) for key in CURVES if (curve := self.curves.get(key)) and len(curve.points()) > 1]
        room = height - len(lines)
        layers = self._chosen_layers(max(1, room - min(2, len(curves)))) if self.loads else []
        for key, curve in curves[: max(0, room - len(layers))]:
            lines.append(_curve_line(key, curve, width, signs))
        for name in layers[: max(0, height - len(lines))]:
            lines.append(_load_line(name, self.loads[name], width, signs))
        for line in lines:
            _crop(line, width, signs)
        return lines

    def _progress(self, step: int, eta: str, width: int, signs: Signs) -> Text:
        share = min(1.0, step / max(1, self.total_steps))
        head = f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"
        tail = f"{math.floor(100 * share):>3}%" + (f"  {eta}" if eta else "")
        room = min(60, width - len(head) - len(tail) - 4)
        if room < 5:
            line = Text(f"{head}  {tail}")
            _crop(line, width, signs)
            return line
        full = int(share * room)
        tip = signs.tip if full < room else ""
        bar = Text.assemble((signs.done * full + tip, "green"), (signs.left * (room - full - len(tip)), "dim"))
        return Text.assemble((head, "bold"), "  ", bar, "  ", tail)

    def _chosen_layers(self, most: int) -> list[str]:
        """All layers where there is room, else those with the most uneven loads, in the model's order."""
        names = list(self.loads)
        if len(names) <= most:
            return names
        worst = set(sorted(names, key=lambda name: _unevenness(self.loads[name]), reverse=True)[:most])
        return [name for name in names if name in worst]


def sparkline(values: Sequence[float], width: int, signs: Signs = BLOCKS) -> str:
    """Draw values, the smallest at the bottom, in at most `width` columns; a point that is not finite is a "!"."""
    columns = [_mean(part) for part in _parts(values, width)]
    finite = [value for value in columns if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(signs.ramp) - 1) / (high - low) if high > low else 0.0
    return "".join(signs.ramp[round((value - low) * scale)] if math.isfinite(value) else signs.odd for value in columns)


def load_strip(counts: Sequence[int], width: int, signs: Signs = BLOCKS) -> str:
    """Draw the load of each expert, at half height where it is the mean and full where it is twice that or more.

    With more experts than columns, neighbors share a column: the largest of them, or dead where one of them is.
    """
    mean = _mean(counts)
    top = len(signs.ramp) - 1
    strip = ""
    for part in _parts(counts, width):
        if min(part) == 0:
            strip += signs.dead
        else:
            strip += signs.ramp[min(top, round(max(part) / (2 * mean) * top))]
    return strip


def _curve_line(key: str, curve: Curve, width: int, signs: Signs) -> Text:
    assert curve.first is not None and curve.last is not None
    ends = f"{curve.first:.4g} .. {curve.last:.4g}"
    room = min(60, width - _LABEL - len(ends) - 2)
    drawn = sparkline(curve.points(), room, signs) if room >= _NARROWEST_CURVE else ""
    return Text.assemble((_label(key, signs), "bold"), (drawn, "cyan"), "  " if drawn else "", ends)


def _load_line(name: str, counts: Sequence[int], width: int, signs: Signs) -> Text:
    mean = _mean(counts)
    text = f"busiest {max(counts) / mean:.1f}x the mean" if mean else "no token"
    dead = [str(expert) for expert, count in enumerate(counts) if count == 0]
    # The number of them first where not all can be named.
    named = f", {f'{len(dead)} ' if len(dead) > 4 else ''}dead: {' '.join(dead)}" if dead else ""
    room = width - _LABEL - len(text) - 2 - min(_ROOM_FOR_DEAD, len(named))
    strip = load_strip(counts, max(_NARROWEST_CURVE, min(64, room)), signs)
    return Text.assemble((_label(name, signs), "bold"), (strip, "magenta"), "  ", text, (named, "red"))


def _label(name: str, signs: Signs) -> str:
    kept = name if len(name) <= _LABEL - 2 else signs.cut + name[-(_LABEL - 3) :]
    return f"{kept:<{_LABEL}}"


def _crop(line: Text, width: int, signs: Signs) -> None:
    if len(line) > width:
        line.right_crop(len(line) - max(0, width - 1))
        line.append(signs.cut[: max(0, width)])


def _parts(values: Sequence[float], width: int) -> list[Sequence[float]]:
    """Cut into at most `width` nearly equal pieces, none empty."""
    number = max(1, min(width, len(values)))
    bounds = [at * len(values) // number for at in range(number + 1)]
    return [values[lo:hi] for lo, hi in itertools.pairwise(bounds) if hi > lo]


def _unevenness(counts: Sequence[int]) -> tuple[int, float]:
    mean = _mean(counts)
    return sum(count == 0 for count in counts), max(counts) / mean if mean else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
