"""Colors, and the way from a matplotlib figure to SVG inside a page or to a PNG file.

For the page a figure is drawn in marker colors (#0a0001, ...): each becomes a variable of the style sheet, which knows
light and dark.  For a file it is drawn in the light colors.  Line colors follow Okabe and Ito ("Color universal
design", 2008), which people with the common kinds of color blindness can tell apart; lines differ in dashes as well.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeflow.errors import MoeflowError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Variable of the style sheet -> (light, dark).
COLORS: dict[str, tuple[str, str]] = {
    "ink": ("#1b1f24", "#e6e9ee"),
    "muted": ("#57606a", "#a3adb8"),
    "grid": ("#d8dee4", "#363d47"),
    "paper": ("#ffffff", "#15191f"),
    "line0": ("#0072b2", "#56b4e9"),
    "line1": ("#d55e00", "#ff8a3d"),
    "line2": ("#007a5a", "#2fd0a2"),
    "line3": ("#a64d85", "#e29ac6"),
    "line4": ("#8a6d00", "#f0e442"),
    "line5": ("#4b4f9c", "#a7abff"),
    "line6": ("#1b1f24", "#e6e9ee"),
    "line7": ("#7a3b00", "#d6a77a"),
}
LINES = 8
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
#: Width of a picture in points; the page shows it at about that many pixels, on a phone at a little less.
WIDTH = 420.0
FONT = 12.0

_NEEDS = (
    "moeflow report draws with matplotlib, which is not installed.",
    'pip install "moeflow[report]" (or: pip install matplotlib)',
)
#: What a PNG file of a report says about its origin: such files may be written again.
SOFTWARE = "moeflow report"


@dataclass(frozen=True)
class Palette:
    """Colors of a figure.

    Attributes:
        values: names of `COLORS` -> what matplotlib is given.
        title_on_top: whether the figure gets a title of its own.
    """

    values: dict[str, str]
    title_on_top: bool = False

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def line(self, number: int) -> str:
        """Color of the line of that number."""
        return self.values[f"line{number % LINES}"]


#: Markers for the page, and the light colors for files.
PAGE = Palette({name: f"#0a00{number:02x}" for number, name in enumerate(COLORS)})
PRINT = Palette({name: light for name, (light, _) in COLORS.items()}, title_on_top=True)


def dashes(number: int) -> Any:
    """Dashes of the line of that number, in matplotlib's notation."""
    return DASHES[number % len(DASHES)]


def check_installed() -> None:
    """Make sure that there is matplotlib.

    Raises:
        MoeflowError: it is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MoeflowError(*_NEEDS) from error


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """An empty figure of a size in points, without a background of its own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
    figure.patch.set_visible(False)
    return figure


def style_axes(axes: Any, palette: Palette, grid: bool = True) -> None:
    """Quiet axes: no frame at the top and on the right, a faint grid."""
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(palette["muted"])
        spine.set_linewidth(0.8)
    axes.tick_params(colors=palette["muted"], labelcolor=palette["muted"], labelsize=FONT, width=0.8, length=3)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(palette["muted"])
        label.set_fontsize(FONT)
    if grid:
        axes.grid(color=palette["grid"], linewidth=0.7)
        axes.set_axisbelow(True)


def add_legend(figure: Figure, palette: Palette, labels: Sequence[str]) -> None:
    """A legend of all lines of a figure, beside its axes, in as many columns as have room."""
    longest = max(map(len, labels))
    figure.legend(
        # A title takes the room above.
        loc="outside lower left" if palette.title_on_top else "outside upper left",
        ncols=max(1, min(len(labels), int(WIDTH / (46 + 0.6 * FONT * longest)))),
        frameon=False,
        fontsize=FONT,
        labelcolor=palette["ink"],
        handlelength=2.2,
        columnspacing=1.2,
    )


def to_svg(figure: Figure, label: str, salt: str) -> str:
    """Return a figure as an SVG element for a page.

    Args:
        figure: drawn in `PAGE`.
        label: what it shows, for those who do not see it.
        salt: differs from figure to figure of a page, so that their ids do.
    """
    import matplotlib

    stream = io.StringIO()
    # Text stays text: sharp, small, and in the font of the page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": ["sans-serif"]}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"\n\s*", "\n", text)
    for name, marker in PAGE.values.items():
        text = text.replace(marker, f"var(--{name})")
    size = re.search(r'viewBox="([^"]+)"', text)
    assert size is not None
    head = f'<svg viewBox="{size.group(1)}" role="img" aria-label="{_attribute(label)}">'
    return head + text[text.index(">") + 1 :].strip()


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def to_png(figure: Figure, path: Path, title: str) -> None:
    """Write a figure as a PNG file on white, with its title.

    Args:
        figure: drawn in `PRINT`.
        path: of the file.
        title: above the picture.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib

    figure.suptitle(title, fontsize=FONT + 2, color=PRINT["ink"], fontweight="bold")
    figure.patch.set_visible(True)
    figure.patch.set_facecolor(PRINT["paper"])
    with matplotlib.rc_context({"font.family": ["sans-serif"]}):
        figure.savefig(path, format="png", dpi=180, metadata={"Software": SOFTWARE})


def style_sheet() -> str:
    """The variables of the style sheet: light ones, and dark ones where the reader prefers them."""
    light, dark = (";".join(f"--{name}:{pair[side]}" for name, pair in COLORS.items()) for side in (0, 1))
    return f":root{{{light}}}\n@media (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
