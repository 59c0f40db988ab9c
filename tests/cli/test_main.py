"""The command itself: sub-commands, help, exit codes, and the time that each answer takes."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import moeflow as package
from moeflow.cli.verbs import VERBS
from moeflow.config.keys import all_key_names
from moeflow.config.options import group_names, options
from tests.distributed import ROOT

QUICK = [
    ["--help"],
    ["--version"],
    ["train", "--help"],
    ["resume", "--help"],
    ["recipes"],
    ["recipes", "cifar_moe"],
    ["ls"],
    ["completion", "bash"],
    ["_complete", "bash", "moeflow train +recipe=cifar_moe gate="],
    ["_complete", "bash", "moeflow train optim.l"],
    ["train", "+recipe=cifar_moe", "--cfg", "job"],
    ["check", "+recipe=cifar_moe"],
    ["train", "optim.lrr=1"],
]


def test_overview_lists_every_sub_command(moeflow) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        code, out, err = moeflow(*words)
        assert (code, err) == (0, "")
        for verb in VERBS.values():
            assert (verb.summary in out) == (not verb.hidden)


def test_version(moeflow) -> None:
    assert moeflow("--version") == (0, f"moeflow {package.__version__}\n", "")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if not VERBS[verb].hidden])
def test_help_of_each(moeflow, verb: str) -> None:
    code, out, _ = moeflow(verb, "--help")
    assert code == 0
    assert f"moeflow {verb}" in out
    assert moeflow("help", verb)[1] == out


def test_the_long_help_tells_everything_that_can_be_set(moeflow) -> None:
    out = moeflow("train", "--help")[1]
    for key in all_key_names():
        assert re.search(rf"^ +{re.escape(key)}=", out, re.MULTILINE), key
    for group in group_names():
        for name in options(group):
            assert re.search(rf"\b{name}\b", out), (group, name)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["zzz"], "moeflow --help"),
        (["+recipe=cifar_moe"], "mend: moeflow train +recipe=cifar_moe"),
        (["train", "--dryrun"], "Did you mean '--dry-run'?"),
        (["train", "--cfg"], "moeflow train --help"),
        (["train", "--cfg", "all", "gate=switch"], "moeflow train --help"),
        (["train"], "moeflow train +recipe=NAME"),
        (["train", "--multirun", "--dry-run", "gate=a,b"], "--multirun"),
        (["recipes", "x"], "moeflow recipes"),
        (["resume"], "RUN_DIR"),
        (["resume", "optim.lr=3"], "RUN_DIR"),
        (["eval", "nowhere"], "no run folder"),
        (["completion", "bsh"], "Did you mean 'bash'?"),
        (["check", "none.yaml"], "does not exist"),
    ],
)
def test_mistakes_are_one_message(moeflow, tmp_path: Path, monkeypatch, words: list[str], expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = moeflow(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert expected in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_a_defect_keeps_its_traceback(moeflow, monkeypatch) -> None:
    def defect(argv: list[str]) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("moeflow.cli.recipes.main", defect)
    with pytest.raises(ZeroDivisionError):
        moeflow("recipes")


def test_ctrl_c_is_no_traceback(moeflow, monkeypatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("moeflow.cli.recipes.main", interrupted)
    assert moeflow("recipes") == (130, "", "interrupted\n")


def test_a_reader_that_goes_away(cli) -> None:
    command = f"{sys.executable} -m moeflow train --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: moeflow train")
    assert done.stderr == ""


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_answers_at_once(words: list[str], tmp_path: Path) -> None:
    """Processor time, the least of three: other work on the machine does not count.  The aim is half a second."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "moeflow", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            timeout=60,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 1.0


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_torch_is_not_imported(words: list[str], tmp_path: Path) -> None:
    code = f"import sys; from moeflow.cli.main import main; main({words!r}); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def test_help_needs_no_hydra() -> None:
    words = [
        words
        for words in QUICK
        if words[0] != "check" and "+recipe=cifar_moe" not in words and words[-1] != "optim.lrr=1"
    ]
    code = f"import sys; from moeflow.cli.main import main; [main(w) for w in {words!r}]"
    code += "; sys.exit('omegaconf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_from_a_foreign_folder(cli, tmp_path: Path) -> None:
    """The real process, away from the checkout, with the package on the path."""
    done = cli("train", "+recipe=cifar_moe", "optim.lrr=1", PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Did you mean 'optim.lr'?" in done.stderr
    assert not list(tmp_path.iterdir())


def test_in_a_folder_that_is_not_there_any_more(moeflow, tmp_path, monkeypatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, _, err = moeflow("check", "+recipe=cifar_moe")
    monkeypatch.chdir(tmp_path)
    assert (code, err) == (2, "error: the current folder is not there any more.\n  mend: cd FOLDER\n")


def test_closed_streams_lead_nowhere(cli, tmp_path) -> None:
    script = "exec {python} -m moeflow check +recipe=cifar_moe "
    for closed, said in ((">&-", ""), (">&- 2>&-", ""), ("<&-", "cifar_moe")):
        done = subprocess.run(
            ["bash", "-c", script.format(python=sys.executable) + closed],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, ""), closed
        assert said in done.stdout


def test_words_and_folders_that_are_no_text(cli, moeflow, training, tmp_path, monkeypatch) -> None:
    word = os.fsdecode(b"run.name=\xff")
    code, _, err = moeflow("train", "+recipe=cifar_moe", word)
    assert code == 2
    assert "not UTF-8 text" in err
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    code, _, err = moeflow("train", "+recipe=cifar_moe")
    assert code == 2
    assert "is not UTF-8 text.\n  mend: rename the folder" in err
    assert not list(folder.glob("outputs/*/*"))
