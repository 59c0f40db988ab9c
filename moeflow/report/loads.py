"""Heat maps of the experts: layer x expert at any moment, expert x time of each layer, layer x time of its gate.

A load is relative: tokens of an expert over the mean of its layer's experts, so 1 is an even share whatever the batch.
"""

from __future__ import annotations

import base64
import functools
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from moeflow.report import theme
from moeflow.report.pictures import Picture
from moeflow.report.reading import LayerHistory, RunData
from moeflow.report.theme import Palette
from moeflow.report.thinning import bucket_starts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Columns of a map over time, and cells of all maps of a page: about 2 bytes each.
_COLUMNS = 200
_LEAST_COLUMNS = 20
_CELLS = 1_000_000
_FRAMES, _LEAST_FRAMES = 60, 12
_SHADES = 64
_MOMENTS = 4
#: Dark blue to yellow, alike to all kinds of color vision; what got nothing at all is vermilion.
MAP, NOTHING = "cividis", "#d55e00"
_IDLE_SHOWN = 12


@dataclass(frozen=True)
class Binned:
    """The loads of a run's layers in buckets of steps.

    Attributes:
        names: of the layers.
        first: int64 [N], first step of each bucket.
        last: int64 [N], last step of it.
        loads: per layer float64 [N, E], mean over the bucket; 0 only where the expert got nothing in all of it.
        entropy: float64 [N, layers], nats.
        dropped: float64 [N, layers], share of the choices.
        most: rows in the fullest bucket.
        top: load at the bright end of the colors.
    """

    names: list[str]
    first: np.ndarray
    last: np.ndarray
    loads: list[np.ndarray]
    entropy: np.ndarray
    dropped: np.ndarray
    most: int
    top: float


def bin_loads(run: RunData, runs: int = 1) -> Binned | None:
    """Put the rows of a run's experts.jsonl into buckets of equal width in steps.

    Args:
        run: of which there may be no such rows: then there is no result.
        runs: that share the page.
    """
    if not run.layers:
        return None
    # Rows are written for all layers at once; what only an earlier or a damaged row has is left out.
    end = max(layer.steps[-1] for layer in run.layers.values())
    names = [name for name, layer in run.layers.items() if layer.steps[-1] == end]
    steps = functools.reduce(np.intersect1d, [run.layers[name].steps for name in names])
    layers = [_at(run.layers[name], steps) for name in names]
    counts = sum(layer.tokens.shape[1] for layer in layers)
    columns = min(_COLUMNS, max(_LEAST_COLUMNS, _CELLS // (counts * runs)))
    starts = bucket_starts(steps, columns) if len(steps) > columns else np.arange(len(steps))
    ends = np.append(starts[1:], len(steps))
    loads = [_relative(layer, starts, ends) for layer in layers]
    return Binned(
        names,
        steps[starts],
        steps[ends - 1],
        loads,
        np.stack([_means(layer.entropy, starts, ends) for layer in layers], 1),
        np.stack([_means(layer.dropped, starts, ends) for layer in layers], 1),
        int((ends - starts).max()),
        _bright_end(loads),
    )


def _at(layer: LayerHistory, steps: np.ndarray) -> LayerHistory:
    places = np.searchsorted(layer.steps, steps)
    return LayerHistory(steps, layer.tokens[places], layer.dropped[places], layer.entropy[places])


def _relative(layer: LayerHistory, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    tokens = layer.tokens.astype(np.float64)
    mean = tokens.mean(1, keepdims=True)
    return _means(np.divide(tokens, mean, out=np.ones_like(tokens), where=mean > 0), starts, ends)


def _means(values: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    counts = ends - starts
    return np.add.reduceat(values, starts, axis=0) / counts.reshape(-1, *[1] * (values.ndim - 1))


def _bright_end(loads: list[np.ndarray]) -> float:
    """At least 2, and no more than what 1% of the cells exceed."""
    return float(max(2.0, math.ceil(np.quantile(np.concatenate([load.ravel() for load in loads]), 0.99) * 2) / 2))


def idle_experts(run: RunData) -> list[tuple[str, int, int]]:
    """(layer, expert, steps) of the experts that have had no token up to the end, for the most steps first."""
    found = []
    for name, layer in run.layers.items():
        rows = len(layer.steps)
        if rows < 2:
            continue
        busy = layer.tokens > 0
        # Rows since the last one with a token: all of them where there never was one.
        since = np.where(busy.any(0), np.argmax(busy[::-1], axis=0), rows)
        for expert in np.flatnonzero(since):
            begin = layer.steps[rows - int(since[expert])]
            found.append((name, int(expert), int(layer.steps[-1] - begin)))
    return sorted(found, key=lambda item: -item[2])


def idle_html(run: RunData, many: bool) -> str:
    """Which experts are dead, in words."""
    idle = idle_experts(run)
    of = f"Run {run.letter}: " if many else ""
    if not idle:
        return f"<p>{of}Every expert got a token in the last recorded step.</p>"
    lines = [
        f"<li>expert {expert} of <code>{escape(layer)}</code>: no token "
        + (f"in the recorded steps of the last {steps:,}</li>" if steps else "in the last recorded step</li>")
        for layer, expert, steps in idle[:_IDLE_SHOWN]
    ]
    more = f"<li>and {len(idle) - _IDLE_SHOWN} more</li>" if len(idle) > _IDLE_SHOWN else ""
    return f"<p>{of}Experts without a token at the end:</p><ul>{''.join(lines)}{more}</ul>"


# --- pictures --------------------------------------------------------------------------------------------------------


def load_pictures(run: RunData, binned: Binned, many: bool) -> list[Picture]:
    """Layer x expert at some moments, expert x time of each layer, entropy and dropped tokens of each layer."""
    suffix, of = (f"_{run.letter}", f" of run {run.letter}") if many else ("", "")
    averaged = f" Each column is the mean of up to {binned.most} recorded steps." if binned.most > 1 else ""
    pictures = []
    if len({load.shape[1] for load in binned.loads}) == 1:
        pictures.append(
            Picture(
                f"loads{suffix}",
                f"Load of each expert in each layer{of}",
                f"At {_moments(binned).size} moments; colors as above.",
                f"Maps of {len(binned.names)} layers by {binned.loads[0].shape[1]} experts",
                functools.partial(_draw_moments, binned),
            )
        )
    for number, name in enumerate(binned.names):
        pictures.append(
            Picture(
                f"loads_{_safe(name)}{suffix}",
                f"Experts of {name}{of}",
                f"Load of each expert over the steps; 1 is an even share.{averaged}",
                _load_label(name, binned.loads[number]),
                functools.partial(_draw_layer, binned, number),
            )
        )
    if len(binned.names) > 1:
        for key, title, values, percent in (
            ("entropy_layers", "Gate entropy of each layer", binned.entropy, False),
            ("dropped_layers", "Dropped tokens of each layer", binned.dropped, True),
        ):
            # Nothing dropped at all is told by the curve.
            if np.isfinite(values).any() and not (percent and values.max() == 0):
                caption = ("Share of the choices." if percent else "Nats.") + averaged
                draw = functools.partial(_draw_layers, binned, values, percent)
                pictures.append(Picture(f"{key}{suffix}", f"{title}{of}", caption, title, draw))
    return pictures


def _load_label(name: str, load: np.ndarray) -> str:
    last = load[-1]
    return (
        f"Map of the experts of {name} over the steps. At the end expert {int(last.argmax())} has the largest load, "
        f"{last.max():.2f} of an even share, and expert {int(last.argmin())} the smallest, {last.min():.2f}"
    )


def _safe(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _colors(values: np.ndarray, top: float) -> np.ndarray:
    """uint8 [..., 3] of relative loads."""
    import matplotlib
    from matplotlib.colors import to_rgb

    # Steps of color that the eye does not tell apart, and that take half as much room.
    shades = np.round(np.clip(values / top, 0.0, 1.0) * _SHADES) / _SHADES
    rgb = matplotlib.colormaps[MAP](shades)[..., :3]
    rgb[values == 0] = to_rgb(NOTHING)
    return np.round(255 * rgb).astype(np.uint8)


def _map_axes(axes: Any, palette: Palette, binned: Binned, image: Any, rows: int, **options: Any) -> Any:
    """Show [rows, columns, ...] over the steps; the first row is at the top."""
    theme.style_axes(axes, palette, grid=False)
    shown = axes.imshow(
        image, aspect="auto", interpolation="none", extent=(binned.first[0], _end(binned), rows - 0.5, -0.5), **options
    )
    _step_axis(axes)
    return shown


def _end(binned: Binned) -> float:
    first, last = float(binned.first[0]), float(binned.last[-1])
    return last if last > first else first + 1


def _step_axis(axes: Any) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _whole_numbers(axis: Any, count: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(min(5, max(1, count - 1)), integer=True, steps=[1, 2, 4, 5, 8, 10]))


def _draw_layer(binned: Binned, number: int, palette: Palette) -> Figure:
    load = binned.loads[number]
    figure = theme.new_figure(min(260.0, 110.0 + 2.0 * load.shape[1]))
    axes = figure.add_subplot()
    _map_axes(axes, palette, binned, _even(_colors(load, binned.top), binned).swapaxes(0, 1), load.shape[1])
    axes.set_ylabel("expert")
    _whole_numbers(axes.yaxis, load.shape[1])
    _color_bar(figure, axes, palette, 0.0, binned.top)
    return figure


def _even(image: np.ndarray, binned: Binned) -> np.ndarray:
    """Repeat columns so that steps are spread evenly, where rows were written ever more rarely."""
    gaps = np.diff(binned.first)
    if len(gaps) < 2 or gaps.max() <= 2 * gaps.min():
        return image
    places = np.linspace(binned.first[0], binned.last[-1], _COLUMNS)
    return image[np.clip(np.searchsorted(binned.first, places, side="right") - 1, 0, len(image) - 1)]


def _draw_layers(binned: Binned, values: np.ndarray, percent: bool, palette: Palette) -> Figure:
    rows = values.shape[1]
    figure = theme.new_figure(min(260.0, 120.0 + 8.0 * rows))
    axes = figure.add_subplot()
    finite = values[np.isfinite(values)]
    low, high = (0.0, max(float(finite.max()), 0.01)) if percent else (float(finite.min()), float(finite.max()))
    high = high if high > low else low + 1e-6
    shown = _map_axes(axes, palette, binned, _even(values, binned).T, rows, cmap=MAP, vmin=low, vmax=high)
    axes.set_yticks(*_layer_ticks(binned.names))
    axes.set_ylabel("layer")
    bar = figure.colorbar(shown, ax=axes, pad=0.02, aspect=14)
    _style_bar(bar, palette, percent)
    return figure


def _layer_ticks(names: Sequence[str]) -> tuple[list[int], list[str]]:
    chosen = sorted({round(i) for i in np.linspace(0, len(names) - 1, min(6, len(names)))})
    return chosen, [short(names[i]) for i in chosen]


def short(name: str) -> str:
    """The number in a layer's name, where there is one."""
    number = re.search(r"\d+", name)
    return number.group() if number else name


def _color_bar(figure: Figure, axes: Any, palette: Palette, low: float, high: float) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    mappable = ScalarMappable(Normalize(low, high), MAP)
    _style_bar(figure.colorbar(mappable, ax=axes, pad=0.02, aspect=14, extend="max"), palette, False)


def _style_bar(bar: Any, palette: Palette, percent: bool) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_locator(MaxNLocator(4))
    if percent:
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, symbol="%"))
    bar.ax.tick_params(colors=palette["muted"], labelcolor=palette["muted"], labelsize=theme.FONT, length=3)


def _moments(binned: Binned) -> np.ndarray:
    return np.unique(np.linspace(0, len(binned.first) - 1, _MOMENTS).round().astype(int))


def _draw_moments(binned: Binned, palette: Palette) -> Figure:
    moments = _moments(binned)
    rows, experts = len(binned.names), binned.loads[0].shape[1]
    figure = theme.new_figure(30.0 + len(moments) * min(90.0, 34.0 + 5.0 * rows))
    grid = figure.subplots(len(moments), 1, sharex=True, squeeze=False)[:, 0]
    for axes, moment in zip(grid, moments, strict=True):
        theme.style_axes(axes, palette, grid=False)
        image = np.stack([load[moment] for load in binned.loads])
        axes.imshow(_colors(image, binned.top), aspect="auto", interpolation="none",
                    extent=(-0.5, experts - 0.5, rows - 0.5, -0.5))  # fmt: skip
        axes.set_title(_steps(binned, moment), fontsize=theme.FONT, color=palette["ink"], loc="left", pad=3)
        ticks, labels = _layer_ticks(binned.names)
        axes.set_yticks(ticks[:: max(1, len(ticks) - 1)], labels[:: max(1, len(ticks) - 1)])
        axes.set_ylabel("layer")
    grid[-1].set_xlabel("expert")
    _whole_numbers(grid[-1].xaxis, experts)
    return figure


def _steps(binned: Binned, moment: int) -> str:
    first, last = int(binned.first[moment]), int(binned.last[moment])
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


# --- the map that a slider moves through time ------------------------------------------------------------------------


def player_html(run: RunData, binned: Binned, many: bool) -> str:
    """Layer x expert, with a slider over the steps, and the colors of all maps of the run.

    All moments are one picture, one above the other, of which a window shows one.
    """
    if len({load.shape[1] for load in binned.loads}) != 1 or len(binned.first) < 2:
        return _legend(binned.top)
    rows, experts = len(binned.names), binned.loads[0].shape[1]
    frames = min(_FRAMES, max(_LEAST_FRAMES, _CELLS // (4 * rows * experts)))
    chosen = np.unique(np.linspace(0, len(binned.first) - 1, frames).round().astype(int))
    image = np.concatenate([np.stack([load[moment] for load in binned.loads]) for moment in chosen])
    uri = _png(_colors(image, binned.top))
    labels = [_steps(binned, moment) for moment in chosen]
    last = len(chosen) - 1
    title = "Load of each expert in each layer" + (f", run {run.letter}" if many else "")
    key = f"player{run.letter}"
    cell = max(6, min(22, 240 // rows))
    return (
        f'<figure class="player" data-labels="{escape("|".join(labels))}"><figcaption>{title}</figcaption>'
        f'<div class="frame" role="img" aria-label="{title} at the chosen steps" style="height:{rows * cell}px;'
        f"background-image:url({uri});background-size:100% {100 * len(chosen)}%;background-position:0 100%"
        f'"></div>'
        f'<p class="axis">experts 0 to {experts - 1} from left to right; layers from top to bottom: '
        f"{escape(', '.join(binned.names[:1] + (['...'] if rows > 2 else []) + binned.names[1:][-1:]))}</p>"
        f'<label for="{key}">Moment: <output>{labels[-1]}</output></label>'
        f'<input id="{key}" type="range" min="0" max="{last}" value="{last}">'
        f'{_legend(binned.top)}<p class="caption">Tokens of an expert over the mean of its layer: 1 is an even share. '
        f"{len(chosen)} moments"
        + (f", each the mean of up to {binned.most} recorded steps" if binned.most > 1 else "")
        + ".</p></figure>"
    )


def _legend(top: float) -> str:
    """The colors of the maps, for the page."""
    import matplotlib
    from matplotlib.colors import to_hex

    stops = ",".join(to_hex(matplotlib.colormaps[MAP](share)) for share in np.linspace(0, 1, 9))
    return (
        f'<p class="bar">almost 0 <i style="background:linear-gradient(90deg,{stops})"></i> {top:g} and more '
        f'<i class="none" style="background:{NOTHING}"></i> no token</p>'
    )


def _png(image: np.ndarray) -> str:
    """A data URI of uint8 [H, W, 3]."""
    from matplotlib.image import imsave

    stream = io.BytesIO()
    imsave(stream, image, format="png")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
