"""Completion: the candidates, and the scripts in the real shells."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moeflow.cli.complete import candidates
from moeflow.config.options import options
from tests.distributed import ROOT


def words(line: str) -> list[str]:
    return [candidate.word for candidate in candidates(line)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("moeflow tra", ["train"]),
        ("moeflow re", ["resume", "report", "recipes"]),
        ("moeflow train gate=s", [f"gate={name}" for name in options("gate") if name.startswith("s")]),
        ("moeflow train +recipe=", [f"+recipe={name}" for name in options("recipe")]),
        ("moeflow train +de", ["+debug="]),
        ("moeflow train optim.l", ["optim.lr="]),
        ("moeflow train opti", ["optim=", "optim."]),
        ("moeflow train --dry", ["--dry-run"]),
        ("moeflow train --cfg ", ["job"]),
        ("moeflow train precision.dtype=", ["precision.dtype=fp32", "precision.dtype=bf16", "precision.dtype=fp16"]),
        ("moeflow train trainer.compile=t", ["trainer.compile=true"]),
        ("moeflow train optim.clip_norm=", ["optim.clip_norm=1.0", "optim.clip_norm=null"]),
        ("moeflow train -m gate=naive,swit", ["gate=naive,switch"]),
        ("moeflow train +recipe=cifar_tutorial_moe gate.rand", ["gate.random_second="]),
        ("moeflow train gate=switch gate.jit", ["gate.jitter="]),
        ("moeflow train gate=naive gate.jit", []),
        ("moeflow train nonsense=", []),
        ("moeflow completion z", ["zsh"]),
        ("moeflow recipes cifar_d", ["cifar_dense"]),
        ("moeflow recipes cifar_dense ", []),
        ("moeflow recipes --c", ["--copy", "--config-dir"]),
        ("moeflow ls --j", ["--json"]),
        ("moeflow compare --no", ["--no-tensors"]),
        ("moeflow report --p", ["--png"]),
        ("moeflow nonsense x", []),
        ("moeflow check 'gate=swit", ["gate=switch"]),
        ("moeflow train --config-dir ", []),
        ("", ["train"]),
    ],
)
def test_candidates(line: str, expected: list[str]) -> None:
    found = words(line)
    assert (set(expected) <= set(found)) if not line else found == expected


def test_run_folders_and_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("2024-01-01_00-00-00-aaaaaa", "2025-01-01_00-00-00-bbbbbb"):
        folder = tmp_path / "outputs" / "cifar_moe" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("gate: {name: switch}\n")
    newest = "outputs/cifar_moe/2025-01-01_00-00-00-bbbbbb"
    assert words("moeflow resume ")[0] == newest
    assert words("moeflow eval outputs/cifar_moe/2025")[0] == newest
    assert words(f"moeflow resume {newest} gate.jit") == ["gate.jitter="]
    assert "+recipe=" not in words(f"moeflow resume {newest} ")
    assert len(words("moeflow compare ")) == 2
    assert words(f"moeflow compare {newest} ") == ["outputs/cifar_moe/2024-01-01_00-00-00-aaaaaa"]
    assert words("moeflow ls ") == ["outputs", "outputs/cifar_moe"]


def test_the_users_recipes(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text("# My own.\ndefaults:\n  - override /gate: switch\n")
    assert words(f"moeflow train -cd {tmp_path} +recipe=mi") == ["+recipe=mine"]
    assert words(f"moeflow train -cd {tmp_path} +recipe=mine gate.jit") == ["gate.jitter="]
    # A faulty recipe is the command's to report; TAB goes on with what is certain.
    (tmp_path / "recipe" / "mine.yaml").write_text("defaults: [")
    assert "gate.top_k=" in words(f"moeflow train -cd {tmp_path} +recipe=mine gate.to")


# --- the real shells -------------------------------------------------------------------------------------------------

TYPED = [
    ("moeflow tra\t", "moeflow train "),
    ("moeflow train gate=swit\t", "moeflow train gate=switch "),
    ("moeflow train optim.l\t", "moeflow train optim.lr="),
    ("moeflow train +recipe=cifar_t\t", "moeflow train +recipe=cifar_tutorial_moe "),
    ("moeflow train -m gate=naive,swit\t", "moeflow train -m gate=naive,switch "),
]


@pytest.fixture
def path_with_moeflow(tmp_path: Path) -> str:
    """A PATH on which `moeflow` is this checkout."""
    program = tmp_path / "bin" / "moeflow"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m moeflow "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return f"{program.parent}:{os.environ['PATH']}"


class Terminal:
    """A shell on a terminal of its own."""

    def __init__(self, argv: list[str], path: str, folder: Path):
        self.pid, self.handle = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(
                argv[0], argv, {"PATH": path, "TERM": "dumb", "PS1": "$ ", "HOME": str(folder), "LANG": "C.UTF-8"}
            )
        self.output = ""

    def type(self, keys: str, until: str, limit_s: float = 30.0) -> str:
        """Type, and return what the terminal showed until the pattern came."""
        start, deadline = len(self.output), time.monotonic() + limit_s
        os.write(self.handle, keys.encode())
        while time.monotonic() < deadline and not re.search(until, self.output[start:]):
            if select.select([self.handle], [], [], 0.1)[0]:
                self.output += os.read(self.handle, 65536).decode(errors="replace")
        return self.output[start:]

    def close(self) -> None:
        os.close(self.handle)
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_at_a_terminal(shell: str, path_with_moeflow: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    flags = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}[shell]
    setup = {"bash": "", "zsh": "autoload -U compinit; compinit -u -D; "}[shell]
    terminal = Terminal([shell, *flags], path_with_moeflow, tmp_path)
    try:
        # The marker is split in what is typed, so that only its output matches.
        shown = terminal.type(f'{setup}eval "$(moeflow completion {shell})"; echo REA""DY\n', "READY")
        assert "READY" in shown
        for typed, completed in TYPED:
            # What TAB made of the line is printed by turning it into a quoted word: Ctrl-A, Ctrl-E.
            shown = terminal.type(typed, re.escape(completed.rstrip()))
            assert completed.rstrip() in shown, shown
            shown = terminal.type("\x01printf '<%s>\\n' '\x05'\n", "<.*>\r?\n")
            assert f"<{completed.rstrip()}" in shown, shown
    finally:
        terminal.close()


@pytest.mark.timeout(150)
def test_fish(path_with_moeflow: str, tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    for typed, completed in TYPED:
        done = subprocess.run(
            ["fish", "-c", f"moeflow completion fish | source; complete -C '{typed.rstrip()}'"],
            env={"PATH": path_with_moeflow, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        found = [line.partition("\t")[0] for line in done.stdout.splitlines()]
        assert completed.split()[-1] in found, done.stderr


def test_bash_cuts_what_readline_has_already(path_with_moeflow: str) -> None:
    """Without a terminal, so that it runs everywhere: `=` ends a word in bash, so only the rest may be offered."""
    script = (
        'eval "$(moeflow completion bash)"; COMP_WORDBREAKS=$\' \\t\\n"><=;|&(:\';'
        'COMP_WORDS=(moeflow train gate = swit); COMP_LINE="moeflow train gate=swit"; COMP_POINT=${#COMP_LINE};'
        '_moeflow; printf "<%s>" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": path_with_moeflow}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "<switch >", done.stderr
