"""Pictures of a report: line charts with what the page needs to answer a pointer, and the base of all pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moeflow.report import theme
from moeflow.report.theme import PAGE, Palette
from moeflow.report.thinning import Thinned, told

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEIGHT = 230.0
# Rows of the table under a line chart.
_ROWS = 12


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        key: names its PNG file, and is unique on the page.
        title: above it.
        caption: below it: what is drawn, and what was done to the values.
        label: what there is to see, for those who do not see it.
        draw: makes the figure in a palette.
        hover: what the page's script reads out under the pointer; None where it does not.
        table: heading and rows of the same figures as text; None where there is none.
    """

    key: str
    title: str
    caption: str
    label: str
    draw: Callable[[Palette], Figure]
    hover: Callable[[Figure], dict[str, Any]] | None = None
    table: tuple[list[str], list[list[str]]] | None = None

    def svg(self) -> tuple[str, str | None]:
        """Return the SVG element, and JSON for the page's script."""
        figure = self.draw(PAGE)
        svg = theme.to_svg(figure, self.label, self.key)
        return svg, None if self.hover is None else json.dumps(self.hover(figure), separators=(",", ":"))


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        label: in the legend.
        points: what is drawn.
        number: of its color; runs keep theirs from chart to chart.
        style: of its dashes.
        marked: with a dot at each point, for figures with few of them.
    """

    label: str
    points: Thinned
    number: int = 0
    style: int = 0
    marked: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over the steps.

    Attributes:
        key: names its PNG file.
        title: above it.
        lines: at least one, with at least one point each.
        unit: of the values, beside the axis.
        note: a sentence for the caption.
        percent: whether values are shares.
        from_zero: whether the axis begins at 0.
    """

    key: str
    title: str
    lines: Sequence[Line]
    unit: str = ""
    note: str = ""
    percent: bool = False
    from_zero: bool = False

    def picture(self) -> Picture:
        """Return the chart as a picture."""
        caption = " ".join(filter(None, [self.note, told([line.points for line in self.lines])]))
        return Picture(self.key, self.title, caption, self._label(), self._draw, self._hover, self._table())

    def _label(self) -> str:
        parts = [
            f"{line.label}: {self._text(line.points.mean[0])} at step {line.points.steps[0]:.0f}, "
            f"{self._text(line.points.mean[-1])} at step {line.points.steps[-1]:.0f}"
            for line in self.lines
        ]
        return f"{self.title}. " + "; ".join(parts)

    def _text(self, value: float) -> str:
        return f"{100 * value:.4g}%" if self.percent else f"{value:.5g}"

    def _draw(self, palette: Palette) -> Figure:
        from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

        figure = theme.new_figure(_HEIGHT)
        axes = figure.add_subplot()
        theme.style_axes(axes, palette)
        for line in self.lines:
            _draw_line(axes, line, palette)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(self._tick))
        if self.unit:
            axes.set_ylabel(self.unit)
        _limit(axes, self.lines, self.from_zero)
        if len(self.lines) > 1:
            theme.add_legend(figure, palette, [line.label for line in self.lines])
        return figure

    def _tick(self, value: float, _: Any = None) -> str:
        if self.percent:
            return f"{100 * value:.3g}%"
        if value and (abs(value) >= 1e4 or abs(value) < 1e-3):
            exponent = math.floor(math.log10(abs(value)))
            if 4 <= exponent < 9:
                return f"{value / 1e6:g}M" if exponent >= 6 else f"{value / 1e3:g}k"
            return f"{value:.3g}"
        return f"{value:.4g}"

    def _hover(self, figure: Figure) -> dict[str, Any]:
        """Where the axes lie in the picture (points from its left and top), their ends, and the points of the lines."""
        axes = figure.axes[0]
        box = axes.get_window_extent()
        height = figure.bbox.height
        return {
            "box": [round(v, 1) for v in (box.x0, height - box.y1, box.x1, height - box.y0)],
            "x": list(axes.get_xlim()),
            "y": list(axes.get_ylim()),
            "percent": self.percent,
            "lines": [_hover_line(line) for line in self.lines],
        }

    def _table(self) -> tuple[list[str], list[list[str]]]:
        longest = max(self.lines, key=lambda line: len(line.points.steps)).points.steps
        chosen = sorted({round(i) for i in np.linspace(0, len(longest) - 1, min(_ROWS, len(longest)))})
        rows = []
        for step in longest[chosen]:
            cells = [f"{step:,.0f}"]
            for line in self.lines:
                near = int(np.argmin(np.abs(line.points.steps - step)))
                apart = abs(line.points.steps[near] - step) > _spacing(longest)
                cells.append("-" if apart else self._text(line.points.mean[near]))
            rows.append(cells)
        return ["step", *(line.label for line in self.lines)], rows


def _spacing(steps: np.ndarray) -> float:
    return float(steps[-1] - steps[0]) / max(1, len(steps) - 1) + 0.5


def _draw_line(axes: Any, line: Line, palette: Palette) -> None:
    points, tone = line.points, palette.line(line.number)
    if points.most > 1:
        axes.fill_between(points.steps, points.low, points.high, color=tone, alpha=0.25, linewidth=0)
    alone = len(points.steps) == 1
    axes.plot(
        points.steps,
        points.mean,
        color=tone,
        linestyle=theme.dashes(line.style),
        linewidth=1.6,
        marker="o" if line.marked or alone else None,
        markersize=4,
        label=line.label,
    )


def _limit(axes: Any, lines: Sequence[Line], from_zero: bool) -> None:
    """Leave room around a line that stays the same, and begin at 0 where that is asked for."""
    low = min(float(line.points.low.min()) for line in lines)
    high = max(float(line.points.high.max()) for line in lines)
    if from_zero and low >= 0:
        low = 0.0
        high = high or 1.0
        axes.set_ylim(low, high * 1.05)
    elif high - low <= 1e-9 * max(abs(high), abs(low), 1e-30):
        room = abs(high) * 0.1 or 1.0
        axes.set_ylim(low - room, high + room)


def _hover_line(line: Line) -> dict[str, Any]:
    points = line.points
    found: dict[str, Any] = {
        "n": line.label,
        "c": line.number % theme.LINES,
        "x": [round(float(step), 1) for step in points.steps],
        "y": _short(points.mean),
    }
    if points.most > 1:
        found |= {"lo": _short(points.low), "hi": _short(points.high)}
    return found


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


@dataclass
class Section:
    """A heading of the page with pictures below it.

    Attributes:
        key: of its anchor.
        title: the heading.
        pictures: in order.
        before: HTML above them.
        after: HTML below them.
    """

    key: str
    title: str
    pictures: list[Picture] = field(default_factory=list)
    before: str = ""
    after: str = ""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.pictures or self.before or self.after)
