"""`moeflow report`: one HTML file that shows a run, or several over one another."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from moeflow.cli.arguments import Arguments
from moeflow.cli.runs import shown
from moeflow.errors import ConfigError, MoeflowError
from moeflow.report import Report, make_report
from moeflow.report.page import GENERATOR
from moeflow.report.theme import SOFTWARE
from moeflow.train import rundir
from moeflow.train.rundir import RunDir

NAME = "report.html"
# A file of ours says so within so many bytes.
_HEAD = 1024


def arguments() -> Arguments:
    """Return the flags of `moeflow report`."""
    parser = Arguments("report", words="runs")
    parser.flag("--out", metavar="FILE", help=f"file to write; left out: RUN_DIR/{NAME}, of several runs ./{NAME}")
    parser.flag("--png", metavar="DIR", help="write each picture into DIR as a PNG file too")
    parser.flag("--force", action="store_true", help="replace files that moeflow report did not make")
    return parser


def main(argv: list[str]) -> int:
    """Write the report; returns the exit code."""
    parser = arguments()
    args = parser.read(argv)
    if args.help:
        print(parser.help_text())
        return 0
    if not args.runs:
        raise ConfigError("moeflow report needs a run folder.", "moeflow report RUN_DIR; moeflow ls lists runs")
    runs = [rundir.open(word) for word in args.runs]
    out = Path(args.out) if args.out is not None else runs[0].path / NAME if len(runs) == 1 else Path(NAME)
    _check_free(out, args.force)
    folder = None if args.png is None else _png_folder(Path(args.png))
    report = make_report(runs)
    pictures: list[Path] = []
    if folder is not None:
        for picture in report.pictures:
            _check_free(folder / f"{picture.key}.png", args.force)
    try:
        _write(out, report.html)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            pictures = report.write_pngs(folder)
    except OSError as error:
        raise MoeflowError(
            f"{error.filename or out} cannot be written: {error.strerror}.", "--out FILE at another place"
        ) from error
    print(f"report  {shlex.quote(shown(out))} ({out.stat().st_size / 1e6:.1f} MB, opens offline in any browser)")
    if folder is not None:
        print(f"png     {len(pictures)} pictures in {shlex.quote(shown(folder))}")
    print(f"next    {_next(runs, report)}")
    return 0


def _write(path: Path, text: str) -> None:
    """Write the page, or leave the file as it was."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _check_free(path: Path, force: bool) -> None:
    """Refuse to write over what is not a report's own file."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder.", f"--out {path / NAME}")
    if not path.parent.is_dir() and path.suffix != ".png":
        raise ConfigError(
            f"there is no folder {path.parent} for the report.", f"mkdir -p {shlex.quote(str(path.parent))}"
        )
    if force or not path.exists():
        return
    with open(path, "rb") as stream:
        head = stream.read(_HEAD)
    if GENERATOR.encode() not in head and SOFTWARE.encode() not in head:
        raise ConfigError(
            f"{path} exists, and is not a report of ours.", "--out ANOTHER_FILE, or --force to replace it"
        )


def _png_folder(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--png {path} is a file.", "--png FOLDER")
    return path


def _next(runs: Sequence[RunDir], report: Report) -> str:
    """The command that fits the state of the runs."""
    folders = [shlex.quote(shown(run.path)) for run in runs]
    if len(runs) > 1:
        return f"moeflow compare {folders[0]} {folders[1]}"
    data = report.runs[0]
    if data.state == "running":
        return f"moeflow report {folders[0]}   (again, when it has gone on)"
    if data.latest is None:
        return "moeflow ls"
    undone = data.config is not None and data.latest < data.config.trainer.max_steps
    return f"moeflow {'resume' if undone else 'eval'} {folders[0]}"
