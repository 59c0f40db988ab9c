"""docs/configuration.md says what the code does: its table, its examples, its files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from moeflow.cli.main import main
from moeflow.config import compose_run
from moeflow.config.changes import FREE
from moeflow.config.options import default_choices
from tests.distributed import ROOT

TEXT = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")


def test_the_table_of_resume_is_the_codes() -> None:
    rows = re.findall(
        r"^\| `([^`]+)` \| (.+) \|$", TEXT.split("<!-- resume table")[1].split("\n\nEvery other")[0], re.MULTILINE
    )
    assert dict(rows) == FREE


def test_every_group_is_named() -> None:
    for group in default_choices():
        assert f"`{group}`" in TEXT


def test_commands_that_only_look_work(capsys) -> None:
    lines = [line.strip() for line in TEXT.splitlines() if re.match(r"    (\$ )?moeflow ", line)]
    looked = 0
    for line in lines:
        words = shlex.split(line.removeprefix("$ "))[1:]
        if "my_configs" in words or words[0] == "resume" or "completion" in words:
            continue
        if words[0] == "train" and "--multirun" not in words and "--cfg" not in words:
            words.append("--dry-run")
        if "--multirun" in words:
            continue
        expected = 2 if "optim.lrr=3e-4" in words else 0
        assert main(words) == expected, line
        looked += 1
    assert looked >= 7
    captured = capsys.readouterr()
    for line in TEXT.splitlines():
        if line.startswith(("    note: ", "    error: ", "      1. ", "         mend: ")):
            assert line[4:] in captured.err, line


def test_the_files_shown_compose(tmp_path: Path) -> None:
    blocks = re.findall(r"(?:^    .*\n|^\n)+", TEXT, re.MULTILINE)
    files = [
        "\n".join(line[4:] for line in block.strip("\n").splitlines()) for block in blocks if "defaults:\n" in block
    ]
    (recipe,) = [text for text in files if "cifar_moe" in text]
    (option,) = [text for text in files if "cifar_moe" not in text]
    for name, text in (("recipe/my_run", recipe), ("gate/tight_switch", option)):
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    config = compose_run(["+recipe=my_run"], [tmp_path]).config
    assert (config.gate.name, config.gate.capacity_factor, config.trainer.max_steps) == ("switch", 1.0, 500)
    assert compose_run(["+recipe=my_run", "gate=tight_switch"], [tmp_path]).config.gate.capacity_factor == 1.0
