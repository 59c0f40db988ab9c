"""`moeflow ls`: what it says of runs in every state, on folders made by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.run_folders import add_checkpoint, make_run

LOSSES = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines_of(out: str) -> dict[str, list[str]]:
    """Run -> its cells, of the table."""
    rows = [re.split(r" {2,}", line) for line in out.splitlines() if line.startswith("outputs/")]
    return {row[0]: row[1:] for row in rows}


def test_every_state(moeflow, here: Path) -> None:
    done = make_run(here / "outputs/r/1", [*LOSSES, {"step": 10, "eval/accuracy": 0.5, "eval/loss": 2.0}],
                    run__recipe="r", trainer__max_steps=10)  # fmt: skip
    done.mark("running")
    done.mark("finished", exit_code=0)
    add_checkpoint(done, 10)
    stopped = make_run(here / "outputs/r/2", LOSSES, run__recipe="r", trainer__max_steps=10)
    stopped.mark("running")
    stopped.mark("interrupted", exit_code=130)
    add_checkpoint(stopped, 3)
    failed = make_run(here / "outputs/custom/3", LOSSES, trainer__max_steps=10)
    failed.mark("running")
    failed.mark("failed", error="the loss is nan")
    killed = make_run(here / "outputs/custom/4", LOSSES, trainer__max_steps=10)
    killed.mark("running")
    add_checkpoint(killed, 2)
    make_run(here / "outputs/custom/5", trainer__max_steps=10)
    code, out, err = moeflow("ls")
    assert (code, err) == (0, "")
    table = lines_of(out)
    assert table["outputs/r/1"][:5] == ["r", "finished", "10/10", "0.3333", "accuracy 50.00%"]
    assert table["outputs/r/2"][:4] == ["r", "stopped (resumable)", "3/10", "0.3333"]
    assert table["outputs/custom/3"][:4] == ["-", "failed", "3/10", "0.3333"]
    assert table["outputs/custom/4"][:3] == ["-", "killed (resumable)", "3/10"]
    assert table["outputs/custom/5"][:4] == ["-", "not begun", "-/10", "-"]
    assert "outputs/custom/3: the loss is nan" in out


def test_a_run_that_is_running_says_so(moeflow, here: Path) -> None:
    run = make_run(here / "outputs/r/1", LOSSES)
    run.mark("running")
    add_checkpoint(run, 3)
    with run.lock():
        assert lines_of(moeflow("ls")[1])["outputs/r/1"][1] == "running"
    assert lines_of(moeflow("ls")[1])["outputs/r/1"][1] == "killed (resumable)"


def test_newest_last_whatever_the_folder_is_called(moeflow, here: Path) -> None:
    for name, created in (("b", "2026-01-03"), ("a", "2026-01-02"), ("deep/er/c", "2026-01-01")):
        run = make_run(here / "outputs" / name, LOSSES)
        (run.path / "status.json").write_text(json.dumps({"state": "created", "created": f"{created}T00:00:00+00:00"}))
    assert list(lines_of(moeflow("ls")[1])) == ["outputs/deep/er/c", "outputs/a", "outputs/b"]
    assert list(lines_of(moeflow("ls", "outputs/deep")[1])) == ["outputs/deep/er/c"]
    assert list(lines_of(moeflow("ls", "outputs/a", "outputs/b")[1])) == ["outputs/a", "outputs/b"]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("torn metrics", "0.3333"),
        ("no status", "unknown"),
        ("bad config", "its configuration cannot be read"),
        ("nan", "nan"),
    ],
)
def test_damaged_folders_are_listed_too(moeflow, here: Path, damage: str, expected: str) -> None:
    run = make_run(here / "outputs/r/1", LOSSES)
    if damage == "torn metrics":
        with run.metrics_jsonl.open("a") as stream:
            stream.write('{"step": 4, "lo')
    elif damage == "no status":
        (run.path / "status.json").unlink()
    elif damage == "bad config":
        run.config.write_text("trainer: [")
    else:
        run.metrics_jsonl.write_text('{"step": 1, "loss": "NaN"}\n')
    code, out, _ = moeflow("ls")
    assert code == 0
    assert expected in out
    assert "outputs/r/1" in out


def test_the_end_of_a_long_file_is_enough(moeflow, here: Path) -> None:
    rows = [{"step": step, "loss": float(step), "filler": "x" * 1000} for step in range(1, 2000)]
    make_run(here / "outputs/r/1", rows)
    assert lines_of(moeflow("ls")[1])["outputs/r/1"][2:4] == ["1999/1000", "1999"]


def test_json_and_filters(moeflow, here: Path) -> None:
    run = make_run(here / "outputs/r/1", [*LOSSES, {"step": 3, "eval/perplexity": 7.5}], run__recipe="r")
    add_checkpoint(run, 3)
    make_run(here / "outputs/s/2", run__recipe="s")
    found = json.loads(moeflow("ls", "--json")[1])
    assert [entry["recipe"] for entry in found] == ["r", "s"]
    assert found[0]["path"] == str(run.path)
    assert found[0]["scores"] == {"eval/perplexity": 7.5}
    assert (found[0]["checkpoint"], found[0]["resumable"], found[0]["loss"]) == (3, True, 1 / 3)
    assert [entry["recipe"] for entry in json.loads(moeflow("ls", "--json", "--recipe", "s")[1])] == ["s"]
    assert json.loads(moeflow("ls", "--json", "--status", "running")[1]) == []
    assert "Did you mean 'finished'" in moeflow("ls", "--status", "finish")[2]


@pytest.mark.parametrize(
    ("state", "checkpoint", "expected"),
    [("interrupted", 3, "moeflow resume"), ("finished", 10, "moeflow compare"), ("created", None, "moeflow re")],
)
def test_the_next_command_fits_the_newest_run(moeflow, here: Path, state: str, checkpoint, expected: str) -> None:
    make_run(here / "outputs/r/1", LOSSES)
    run = make_run(here / "outputs/r/2", trainer__max_steps=10)
    run.mark(state)
    if checkpoint is not None:
        add_checkpoint(run, checkpoint)
    assert moeflow("ls")[1].splitlines()[-1].startswith(f"next  {expected}")


def test_nothing_to_list(moeflow, here: Path) -> None:
    assert moeflow("ls") == (0, "no run in outputs\nnext  moeflow recipes\n", "")
    code, _, err = moeflow("ls", "nowhere")
    assert code == 2
    assert "nowhere does not exist" in err


@pytest.mark.timeout(60)
def test_hundreds_of_runs_without_torch(here: Path) -> None:
    run = make_run(here / "outputs/r/0", LOSSES)
    for number in range(1, 300):
        folder = here / f"outputs/r/{number}"
        folder.mkdir()
        for name in ("config.yaml", "status.json", "metrics.jsonl"):
            os.link(run.path / name, folder / name)
    code = (
        "import sys; from moeflow.cli.main import main; main(['ls']); print({'torch', 'hydra'} & {*sys.modules} or '.')"
    )
    before = os.times()
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    after = os.times()
    assert out.splitlines()[-1].strip() == "."
    assert len(lines_of(out)) == 300
    assert after.children_user - before.children_user < 3.0
