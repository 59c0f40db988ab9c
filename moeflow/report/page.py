"""From run folders to the text of the page, and to PNG files of its pictures."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

import moeflow
from moeflow.errors import ConfigError
from moeflow.report import curves, loads, phases, places, tables, theme
from moeflow.report.pictures import Picture, Section
from moeflow.report.reading import RunData, read_run
from moeflow.train.rundir import RunDir

#: Runs over one another in one picture: more can no longer be told apart.
MOST_RUNS = 8
#: What a file of ours says about its origin, near its beginning: such a file may be written again.
GENERATOR = '<meta name="generator" content="moeflow report">'
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass(frozen=True)
class Report:
    """A report that is not written yet.

    Attributes:
        html: text of the page.
        runs: what it shows.
        pictures: of the page, in order.
    """

    html: str
    runs: list[RunData]
    pictures: list[Picture]

    def write_pngs(self, folder: Path) -> list[Path]:
        """Write every picture as a PNG file into an existing folder.

        Raises:
            OSError: a file cannot be written.
        """
        paths = []
        for picture in self.pictures:
            path = folder / f"{picture.key}.png"
            theme.to_png(picture.draw(theme.PRINT), path, picture.title)
            paths.append(path)
        return paths


def make_report(folders: Sequence[RunDir]) -> Report:
    """Read the runs and make the page; nothing is written.

    Args:
        folders: at least one; several are overlaid, in this order.

    Raises:
        MoeflowError: matplotlib is not installed.
        ConfigError: there are too many runs, or one twice.
    """
    if len(folders) > MOST_RUNS:
        raise ConfigError(
            f"moeflow report overlays at most {MOST_RUNS} runs, not {len(folders)}.", "choose fewer: moeflow ls"
        )
    if len({run.path.resolve() for run in folders}) < len(folders):
        raise ConfigError("moeflow report was given one run twice.", "name each run once")
    theme.check_installed()
    runs = [read_run(run, chr(ord("A") + number)) for number, run in enumerate(folders)]
    sections = [section for section in _sections(runs) if not section.empty]
    return Report(_page(runs, sections), runs, [picture for section in sections for picture in section.pictures])


def _sections(runs: Sequence[RunData]) -> list[Section]:
    many = len(runs) > 1
    time = Section("time", "Time per phase", [*phases.phase_pictures(runs), *curves.predicted_pictures(runs)])
    if time.empty:
        time.before = (
            "<p>No profile: <code>trainer.profile_steps=5</code> (or <code>+debug=profile</code>) measures where the "
            "time of a step goes.</p>"
        )
    return [
        Section("training", "Training", curves.training_pictures(runs)),
        _experts(runs),
        time,
        Section("layout", "Layout", before="".join(places.layout_html(run, many) for run in runs)),
        Section("configuration", "Configuration", before=tables.configuration(runs)),
        Section("command", "Command", before=tables.commands(runs)),
        Section("checkpoints", "Checkpoints", before=tables.checkpoints(runs)),
        Section("environment", "Environment", before=tables.environment(runs)),
    ]


def _experts(runs: Sequence[RunData]) -> Section:
    many = len(runs) > 1
    section = Section("experts", "Experts", curves.expert_pictures(runs))
    for run in runs:
        binned = loads.bin_loads(run, len(runs))
        if binned is not None:
            section.before += loads.player_html(run, binned, many) + loads.idle_html(run, many)
            section.pictures += loads.load_pictures(run, binned, many)
    if section.empty:
        section.before = "<p>No MoE layers, or none that were logged yet.</p>"
    return section


# --- HTML ------------------------------------------------------------------------------------------------------------


def _page(runs: Sequence[RunData], sections: Sequence[Section]) -> str:
    title = runs[0].name if len(runs) == 1 else " / ".join(run.name for run in runs)
    links = "".join(f'<li><a href="#{section.key}">{escape(section.title)}</a></li>' for section in sections)
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        GENERATOR,
        f'\n<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n',
        f"<title>{escape(title)} - moeflow report</title>\n",
        f"<style>\n{theme.style_sheet()}{_asset('report.css')}</style>\n</head>\n<body>\n",
        f"<header><h1>{escape(title)}</h1>{_key(runs)}{_notes(runs)}</header>\n",
        tables.outcome(runs),
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main>\n',
        *(_section(section) for section in sections),
        f"</main>\n<footer>{_footer()}</footer>\n<script>\n{_asset('report.js')}</script>\n</body>\n</html>\n",
    ]
    return "".join(parts)


def _asset(name: str) -> str:
    return resources.files("moeflow.report").joinpath(name).read_text(encoding="utf-8")


def _key(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        return f"<p><code>{escape(str(runs[0].path))}</code></p>"
    entries = "".join(
        f'<li><b style="border-color:var(--line{number % theme.LINES})">{run.letter}</b> '
        f"{escape(run.name)} <code>{escape(str(run.path))}</code></li>"
        for number, run in enumerate(runs)
    )
    return f'<ul class="key">{entries}</ul>'


def _notes(runs: Sequence[RunData]) -> str:
    notes = []
    for run in runs:
        of = f"Run {run.letter}: " if len(runs) > 1 else ""
        if run.state == "running":
            notes.append(f"{of}The run was still going on when this was made; the same command makes it anew.")
        if run.summary.get("data") == "synthetic":
            notes.append(f"{of}Trained on drawn (synthetic) data, so its accuracy says nothing about the real set.")
        notes += [f"{of}{note}" for note in run.notes]
    recipes = {run.config.run.recipe for run in runs if run.config is not None}
    if len(recipes) > 1:
        notes.append("The runs are of different recipes: their losses may not be comparable.")
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _section(section: Section) -> str:
    pictures = "".join(map(_figure, section.pictures))
    charts = f'<div class="charts">{pictures}</div>' if pictures else ""
    head = f'<section id="{section.key}"><h2>{escape(section.title)}</h2>'
    return f"{head}{section.before}{charts}{section.after}</section>\n"


def _figure(picture: Picture) -> str:
    svg, hover = picture.svg()
    # In a script element "</" would end it.
    safe = "" if hover is None else hover.replace("</", "<\\/")
    data = f'<script type="application/json">{safe}</script>' if safe else ""
    caption = f'<p class="caption">{escape(picture.caption)}</p>' if picture.caption else ""
    figures = ""
    if picture.table is not None:
        head, rows = picture.table
        figures = tables.details("As a table", tables.table(picture.title, head, rows, numbers=True))
    return (
        f'<figure><figcaption>{escape(picture.title)}</figcaption><div class="plot">{svg}{data}</div>'
        f"{caption}{figures}</figure>\n"
    )


def _footer() -> str:
    now = datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return f"Made by moeflow report {moeflow.__version__} on {now}. Pictures by matplotlib."
