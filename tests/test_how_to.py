"""docs/how_to is followed step by step, in a copy of the sources, and what it adds trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.distributed import ROOT

STEP = re.compile(r"^<!-- (.+?) -->\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
WORDS = {
    "gate": ["+recipe=cifar_moe", "gate=jittered", "gate.noise=0.2"],
    "recipe": ["+recipe=cifar_small"],
    "model": ["+recipe=cifar_moe", "model=tinynet", "launch.processes=2", "parallel.ep=2"],
}


def apply(step: str, text: str, folder: Path) -> None:
    """Do one step of a page in a copy of the sources."""
    if step.startswith("file "):
        path = folder / step.removeprefix("file ")
        assert not path.exists()
        path.write_text(text)
        return
    if found := re.fullmatch(r"line in (\S+): (.+)", step):
        path, old, new = folder / found[1], found[2], text.strip()
    else:
        found = re.fullmatch(r"(before|after) (.+) in (\S+)", step)
        assert found, step
        path, mark = folder / found[3], found[2].removesuffix(" dict")
        # The line that begins so.
        line = next(line for line in path.read_text().splitlines(True) if line.startswith(mark))
        old, new = line, text + line if found[1] == "before" else line + text
    source = path.read_text()
    assert source.count(old) == 1, step
    path.write_text(source.replace(old, new))


def steps(page: str) -> list[tuple[str, str]]:
    text = (ROOT / "docs" / "how_to" / f"{page}.md").read_text()
    return [(step, textwrap.dedent(block).strip("\n") + "\n" if step.startswith("file") else unindented(block))
            for step, block in STEP.findall(text)]  # fmt: skip


def unindented(block: str) -> str:
    """Without the four columns that make it a block of code; inner columns and blank lines are as they stand."""
    lines = [line[4:] if line.startswith("    ") else line for line in block.splitlines(True)]
    if not "".join(lines).lstrip("\n").startswith(("@", "class")):
        return "".join(lines).rstrip("\n") + "\n"
    return "".join(lines).rstrip("\n") + "\n\n\n"


@pytest.mark.slow
@pytest.mark.parametrize("page", WORDS)
def test_the_page_works(page: str, tmp_path: Path):
    for part in ("moeflow", "configs", "recipes", "kernels"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    done = steps(page)
    assert done
    for step, text in done:
        apply(step, text, tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [*WORDS[page], "+debug=tiny", "launch.device=cpu", f"run.dir={tmp_path / 'run'}"]
    run = subprocess.run(
        [sys.executable, "-m", "moeflow", "train", *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    # As `make format`, and then `make lint`.
    ruff = str(Path(sys.executable).parent / "ruff")
    for words in (["check", "-q", "--fix-only"], ["format", "-q"]):
        subprocess.run([ruff, *words, "moeflow"], cwd=tmp_path, check=True)
    checked = subprocess.run([ruff, "check", "moeflow"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_every_page_has_steps_or_names_its_places():
    pages = {path.stem for path in (ROOT / "docs" / "how_to").glob("*.md")}
    assert pages == {*WORDS, "kernel"}
    for name in re.findall(
        r"`((?:kernels|moeflow|tests|benchmarks)/[\w/.]+)`", (ROOT / "docs/how_to/kernel.md").read_text()
    ):
        assert (ROOT / name).exists(), name
