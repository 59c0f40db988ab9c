"""`moeflow report`: what the page tells, and what becomes of folders in every state, made by hand."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moeflow.train import rundir
from tests.cli.run_folders import add_checkpoint, make_run
from tests.report.synthetic import make_long_run

ROWS = [{"step": step, "loss": 1.0 / step, "lr": 0.1, "samples_per_s": 100.0} for step in range(1, 6)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 60 steps with three MoE layers of four experts, over two pipeline stages."""
    folder = tmp_path_factory.mktemp("small") / "run"
    return make_long_run(folder, steps=60, layers=3, experts=4, pp=2, ep=2, processes=4).path


class Outline(HTMLParser):
    """Checks that elements are closed in order; gathers ids, titles of pictures and outside addresses."""

    VOID = {"meta", "link", "input", "br"}

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif tag == "svg" and name == "aria-label":
                self.labels.append(value or "")
            elif name in ("src", "href", "xlink:href"):
                self.addresses.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag


def titles(page: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", page)


def state_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_run_with_everything(moeflow, small: Path, here: Path) -> None:
    before = state_of(small)
    code, out, err = moeflow("report", str(small), "--out", "page.html", "--png", "pictures")
    assert (code, err) == (0, "")
    assert "report  page.html" in out
    assert f"next    moeflow eval {small}" in out
    assert state_of(small) == before
    page = Path("page.html").read_text()
    assert titles(page) == [
        "Loss",
        "Accuracy",
        "Learning rate",
        "Throughput",
        "Gradient norm",
        "Load of each expert in each layer",
        "Imbalance of the experts",
        "Dropped tokens",
        "Gate entropy",
        "Experts without a token",
        "Load balance loss",
        "Imbalance of the ranks",
        "Shadowed experts",
        "Load of each expert in each layer",
        *(f"Experts of blocks.{n}.moe" for n in range(3)),
        "Gate entropy of each layer",
        "Dropped tokens of each layer",
        "Time of a step by phase",
        "Predicted and measured time of the MoE layers",
        "predicted_exchange_s and measured",
    ]
    for text in (
        "moeflow train +recipe=gpt_moe optim.lr=0.002",
        "Differences from recipe gpt_moe",
        "expert 3 of <code>blocks.1.moe</code>: no token",
        "4 processes: pp 2 x dp 2 x tp 1; experts edp 1 x ep 2 x etp 1; engine ddp.",
        "<b>rank 3</b><br>experts 2 to 3",
        "31.0% of what a large matrix product reaches",
        "half of the predictions are within",
    ):
        assert text in page
    assert len(list(Path("pictures").glob("*.png"))) == len(titles(page)) - 1, "all but the one with a slider"
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in Path("pictures").glob("*.png"))


def test_the_page_is_whole_and_fetches_nothing(moeflow, small: Path, here: Path) -> None:
    moeflow("report", str(small), "--out", "page.html")
    page = Path("page.html").read_text()
    outline = Outline(page)
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert all(address.startswith(("#", "data:")) for address in outline.addresses)
    assert not re.search(r"url\((?!data:|#)|@import|fetch\(|XMLHttp", page)
    assert "#0a00" not in page, "a marker color was left"
    assert len(outline.labels) == page.count("<svg")
    assert "Loss. training: " in outline.labels[0]


def test_by_default_it_lies_in_the_run_and_is_made_anew(moeflow, small: Path, here: Path) -> None:
    for _ in range(2):
        code, out, _ = moeflow("report", str(small))
        assert code == 0
        assert (small / "report.html").is_file()
    assert str(small / "report.html") in out
    (small / "report.html").unlink()


def test_runs_are_overlaid(moeflow, small: Path, here: Path) -> None:
    other = make_run(here / "other", ROWS, run__recipe="cifar_moe", run__name="<b>&other", optim__lr=0.25)
    other.mark("running"), other.mark("finished")
    code, out, _ = moeflow("report", str(small), "other", "--png", "pictures")
    assert code == 0
    assert f"next    moeflow compare {small} other" in out
    page = Path("report.html").read_text()
    assert Outline(page).open == []
    assert "different recipes" in page
    assert "&lt;b&gt;&amp;other" in page
    assert "<b>&other" not in page
    assert '<th scope="row">optim.lr</th><td>0.001</td><td>0.25</td>' in page
    assert page.count("Loss. A: ") == 1
    hover = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', page)[0])
    assert [line["n"] for line in hover["lines"]] == ["A", "A evaluation", "B"]
    assert hover["lines"][2] | {"c": 1} == {
        "n": "B", "c": 1, "x": [1, 2, 3, 4, 5], "y": [1.0, 0.5, 0.33333, 0.25, 0.2]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("empty", "No step has been logged yet."),
        ("torn", "metrics.jsonl: the last line is cut; it was left out."),
        ("middle", "metrics.jsonl: 2 damaged lines left out."),
        ("config", "config.yaml cannot be read"),
        ("env", "env.json cannot be read"),
        ("nan", "2 values not finite"),
        ("old", "loads of single experts were not recorded"),
        ("dense", "No MoE layers"),
        ("status", "<td>unknown</td>"),
        ("layout", "The layout cannot be told: parallel.ep=3 does not divide"),
        ("profile", "No profile"),
        ("checkpoint", "damaged: it is not the JSON"),
    ],
)
def test_damaged_and_half_runs(moeflow, here: Path, damage: str, told: str) -> None:
    run = make_run(here / "run", None if damage == "empty" else ROWS)
    rows = run.metrics_jsonl
    if damage == "torn":
        rows.write_text(rows.read_text() + '{"step": 6, "lo')
    elif damage == "middle":
        rows.write_text('\x00\x00\n[1]\n{"step": 0, "loss": 3.0}\n' + rows.read_text())
    elif damage == "config":
        run.config.write_text("trainer: [")
    elif damage == "env":
        (run.path / "env.json").write_text("{")
    elif damage == "nan":
        rows.write_text(rows.read_text() + '{"step": 6, "loss": "NaN"}\n{"step": 7, "loss": "Infinity"}\n')
    elif damage == "old":
        rows.write_text('{"step": 1, "loss": 1.0, "moe/dead": 0}\n')
    elif damage == "status":
        (run.path / "status.json").unlink()
    elif damage == "layout":
        run.config.write_text(run.config.read_text().replace("  ep: 1\n", "  ep: 3\n"))
    elif damage == "profile":
        run.traces.mkdir()
        (run.traces / "step_00000016.json").write_text('{"ranks": [{}]}')
    elif damage == "checkpoint":
        add_checkpoint(run, 5)
    code, _, err = moeflow("report", "run")
    assert (code, err) == (0, "")
    page = Path("run/report.html").read_text()
    assert told in page
    assert Outline(page).open == []
    assert ("Loss" in titles(page)) == (damage != "empty")


def test_what_a_resume_changed_is_told_and_nothing_else(moeflow, small: Path, here: Path) -> None:
    shutil.copytree(small, "run")
    config = Path("run/config.yaml").read_text()
    old = re.sub(r"vocab_size: \d+", "vocab_size: null", config)
    assert "vocab_size: null" in old
    Path("run/config.1.yaml").write_text(re.sub(r"max_steps: 60", "max_steps: 30", old))
    Path("run/config.yaml").write_text(old)
    assert moeflow("report", "run")[0] == 0
    page = Path("run/report.html").read_text()
    (changed,) = re.findall(r"<table><caption>Changed by a resume.*?</table>", page)
    assert re.findall(r'<th scope="row">(.*?)</th>', changed) == ["trainer.max_steps"]
    assert "Stage 1: layer" in page


def test_a_run_that_goes_on(moeflow, here: Path) -> None:
    run = make_run(here / "run", ROWS)
    run.mark("running")
    with run.lock():
        code, out, _ = moeflow("report", "run")
        assert code == 0
        assert "still going on" in (run.path / "report.html").read_text()
        assert "next    moeflow report run " in out


def test_experts_that_change_in_number_or_stop_in_the_middle(moeflow, here: Path) -> None:
    run = make_run(here / "run", ROWS)
    layer = {"tokens": [1, 0, 3], "dropped": 1, "entropy": None}
    lines = [
        {"step": 1, "layers": {"b.0": layer | {"tokens": [1, 2]}, "b.1": layer}},
        {"step": 2, "layers": {"b.0": layer, "b.1": layer, "c": {"tokens": "x"}}},
        {"step": 3, "layers": []},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run.path / "experts.jsonl").write_text(text + '{"step": 4, "laye')
    code, _, err = moeflow("report", "run")
    assert (code, err) == (0, "")
    page = (run.path / "report.html").read_text()
    assert "experts.jsonl: the last line is cut" in page
    assert "Experts of b.0" in page


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "needs a run folder"),
        (["nowhere"], "there is no run folder"),
        (["plain"], "it has no config.yaml"),
        (["plain/file"], "is a file, not a run folder"),
        (["run", "run/"], "one run twice"),
        (["run"] * 9, "at most 8 runs"),
        (["run", "--out", "plain"], "--out plain/report.html"),
        (["run", "--out", "none/such/page.html"], "mkdir -p none/such"),
        (["run", "--out", "plain/file"], "is not a report of ours"),
        (["run", "--png", "plain/file"], "--png plain/file is a file"),
        (["run", "--pgn", "x"], "Did you mean '--png'"),
    ],
)
def test_what_cannot_be_done_is_told(moeflow, here: Path, words: list[str], told: str) -> None:
    make_run(here / "run", ROWS)
    Path("plain").mkdir()
    Path("plain/file").write_text("mine")
    code, _, err = moeflow("report", *words)
    assert code == 2
    assert told in err
    assert "mend:" in err
    assert Path("plain/file").read_text() == "mine"
    assert not list(here.rglob("*.html*"))


def test_files_of_others_are_replaced_by_force_alone(moeflow, here: Path) -> None:
    make_run(here / "run", ROWS)
    Path("pictures").mkdir()
    Path("pictures/loss.png").write_text("mine")
    assert moeflow("report", "run", "--png", "pictures")[0] == 2
    assert not Path("run/report.html").exists()
    assert Path("pictures/loss.png").read_text() == "mine"
    assert moeflow("report", "run", "--png", "pictures", "--force")[0] == 0
    assert moeflow("report", "run", "--png", "pictures")[0] == 0, "its own files are written again"


def test_a_folder_that_cannot_be_written(moeflow, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(here / "run", ROWS)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, _, err = moeflow("report", "run")
    assert code == 2
    assert "cannot be written: No space left" in err
    assert "mend: --out FILE" in err
    assert not list((here / "run").glob("*report*"))


def test_without_matplotlib_the_mend_is_a_command(moeflow, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(here / "run", ROWS)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = moeflow("report", "run")
    assert code == 2
    assert 'mend: pip install "moeflow[report]"' in err


def test_config_yaml_names_the_run_too(moeflow, here: Path) -> None:
    run = make_run(here / "run", ROWS)
    assert moeflow("report", "run/config.yaml")[0] == 0
    assert rundir.RunDir(run.path).path.joinpath("report.html").is_file()
