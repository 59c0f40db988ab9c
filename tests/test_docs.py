"""README and docs: links lead somewhere, commands exist, what they compose is valid, and nothing names one machine."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moeflow.cli.verbs import VERBS
from tests.distributed import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# A command starts a line of a code block, or stands between backquotes; what follows two spaces and a # is a remark.
COMMAND = re.compile(r"^ {4}(.*? (?:-m|--module) )?(moeflow .*)$|`(moeflow [^`]+)`", re.MULTILINE)
MAKE = re.compile(r"^(?: {4}|\t)make ([a-z-]+)|`make ([a-z-]+)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands(page: Path) -> list[str]:
    found = []
    for launcher, line, inline in COMMAND.findall(page.read_text(encoding="utf-8")):
        command = re.split(r"\s{2,}#|\s+\(", line or inline)[0].strip()
        ranks = re.search(r"(?:np|nproc-per-node|num_processes|num_accelerators|num_gpus|srun -n) (\d+)", launcher)
        found.append(f"{command} launch.processes={ranks.group(1)}" if ranks else command)
    return found


def composed(command: str) -> list[str] | None:
    """Overrides of a `moeflow train` or `moeflow check` that can be composed as they stand; None for the others."""
    verb, *words = shlex.split(command)[1:]
    if verb not in ("train", "check") or not words or "..." in command or not any("recipe=" in word for word in words):
        return None
    # A page may stand for a file or folder by a word in capitals, name the reader's own folder, or sweep over choices.
    if "glob(" in command or "-cd" in words or "--config-dir" in words:
        return None
    if any(re.search(r"=([A-Z_]+)(\.\w+)?$|^[A-Z_.]+$", word) for word in words):
        return None
    return [word.split(",")[0] for word in words if "=" in word and "range(" not in word]


PAIRS = [(page.name, command) for page in PAGES for command in commands(page)]


def test_commands_were_found():
    assert len([1 for _, command in PAIRS if composed(command)]) >= 5


@pytest.mark.parametrize(("page", "command"), PAIRS)
def test_commands_exist_and_compose(page, command):
    words = shlex.split(command)
    assert words[1] in VERBS or words[1].startswith("-") or words[1].isupper(), f"{page}: no such sub-command"
    overrides = composed(command)
    if overrides is not None:
        from moeflow.config import compose

        compose(overrides)


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {a or b for page in PAGES for a, b in MAKE.findall(page.read_text())}
    assert {"train", "test"} <= named
    assert named - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_nothing_names_one_machine_or_an_unfinished_place():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    words = ["/wor k/", "/roo t/", "TO DO", "FIX ME", "XX X"]  # apart here, so that this file does not name them itself
    private = re.compile("|".join(word.replace(" ", "") for word in words))
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in {".py", ".md", ".yaml", ".toml", ".cu", ".cuh", ".cpp", ".hpp", ""} and path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{name}:{n} {line.strip()}" for n, line in enumerate(lines, 1) if private.search(line)]
    assert found == []


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "moeflow.moe.layer.MoELayer" in (tmp_path / "site" / "api" / "layer" / "index.html").read_text()
