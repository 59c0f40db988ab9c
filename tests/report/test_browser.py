"""The page in a real browser: no errors, nothing fetched, no sideways scrolling, quick even for a long run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moeflow.report import make_report
from moeflow.train.rundir import RunDir
from tests.report import browser
from tests.report.browser import Page
from tests.report.synthetic import make_long_run

needs_browser = pytest.mark.skipif(
    browser.find() is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is on the PATH"
)
DESKTOP, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of one run, and of two."""
    folder = tmp_path_factory.mktemp("pages")
    runs = [
        make_long_run(folder / name, steps=400, layers=4, experts=8, seed=seed, ep=2, processes=2)
        for seed, name in enumerate(("first", "second"))
    ]
    found = {"one": folder / "one.html", "two": folder / "two.html"}
    found["one"].write_text(make_report(runs[:1]).html)
    found["two"].write_text(make_report(runs).html)
    return found


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_in_a_browser(pages, name, dark, size):
    with Page(*size, dark=dark) as page:
        page.open(pages[name])
        assert page.errors == []
        assert [address for address in page.requests if not address.startswith(("file:", "data:"))] == []
        assert len([address for address in page.requests if address.startswith("file:")]) == 1
        assert page.run("document.documentElement.scrollWidth") == size[0], "the page scrolls sideways"
        paper = page.run("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(21, 25, 31)" if dark else "rgb(255, 255, 255)")
        small = page.run("Math.min(...[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width))")
        assert small > 300, "pictures are too small to read"
        assert page.run(CONTRAST) == []


# Text on the page and in pictures whose contrast to the paper is below 4.5 (WCAG 2.2, 1.4.3).
CONTRAST = """(() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map(
      (v) => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = light(getComputedStyle(document.body).backgroundColor), low = [];
  for (const element of document.querySelectorAll("body, p, td, th, a, summary, pre, li, svg text")) {
    const style = getComputedStyle(element);
    const own = light(element.tagName === "text" ? style.fill : style.color);
    const ratio = (Math.max(own, paper) + 0.05) / (Math.min(own, paper) + 0.05);
    if (ratio < 4.5) low.push(element.tagName + " " + element.textContent.slice(0, 40) + " " + ratio.toFixed(2));
  }
  return low.slice(0, 5);
})()"""


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("<script>nonsense()</script>", lambda page: any("nonsense is not defined" in error for error in page.errors)),
        ('<img src="http://127.0.0.1:9/x.png">', lambda page: page.errors),
        ('<div style="width:500px">wide</div>', lambda page: page.run("document.documentElement.scrollWidth") > 390),
        ('<p style="color:#aaa">faint</p>', lambda page: page.run(CONTRAST)),
    ],
)
def test_the_checks_catch_a_planted_fault(pages, tmp_path, fault, seen):
    faulty = tmp_path / "faulty.html"
    faulty.write_text(pages["one"].read_text().replace("<main>", f"<main>{fault}"))
    with Page(*PHONE) as page:
        page.open(faulty)
        assert seen(page)


@needs_browser
@pytest.mark.slow
def test_the_pointer_reads_values_and_the_slider_moves_time(pages):
    with Page(*DESKTOP) as page:
        page.open(pages["one"])
        box = page.run(
            "(() => { const r = document.querySelector('.plot svg').getBoundingClientRect();"
            "return [r.x, r.y, r.width, r.height]; })()"
        )
        page.point(box[0] + box[2] / 2, box[1] + box[3] / 2)
        tip = page.run("document.querySelector('.plot .tip').innerText")
        step, training, evaluation = tip.splitlines()
        assert 150 < int(step.removeprefix("step ")) < 250
        assert training.startswith("training ")
        assert " to " in training
        assert evaluation.startswith("evaluation ")
        page.point(5, 5)
        assert page.run("document.querySelector('.plot .tip').hidden")
        move = "const i = document.querySelector('.player input'); i.value = 0; i.dispatchEvent(new Event('input'));"
        position = "getComputedStyle(document.querySelector('.player .frame')).backgroundPositionY"
        assert page.run(position) == "100%"
        page.run(f"(() => {{ {move} }})()")
        assert page.run(position) == "0%"
        assert page.run("document.querySelector('.player output').textContent").startswith("step")
        assert page.errors == []


def test_a_long_run_makes_a_small_page_soon(tmp_path):
    """10,000 logged steps of 12 layers of 64 experts."""
    run = make_long_run(tmp_path / "run")
    started = time.process_time()
    html = make_report([RunDir(run.path)]).html
    seconds = time.process_time() - started
    assert len(html.encode()) < 5e6
    assert seconds < 20


@pytest.mark.slow
def test_a_very_large_model_makes_a_page_of_the_same_order(tmp_path):
    """58 layers of 256 experts, as in DeepSeek-V3."""
    run = make_long_run(tmp_path / "run", steps=500, layers=58, experts=256, ep=64, processes=64)
    assert len(make_report([RunDir(run.path)]).html.encode()) < 6e6


@needs_browser
@pytest.mark.slow
def test_a_long_run_opens_at_once(tmp_path):
    run = make_long_run(tmp_path / "run")
    page_file = tmp_path / "page.html"
    page_file.write_text(make_report([RunDir(run.path)]).html)
    times = []
    for _ in range(3):
        with Page(*DESKTOP) as page:
            page.open(page_file)
            page.screenshot(tmp_path / "shot.png")
            times.append(page.load_s)
    # The best of three: others may use the machine meanwhile.
    assert min(times) < 2.0
