"""The first twenty losses of each recipe, kept as text: a change of the numbers shows in a diff.

`UPDATE_GOLDEN=1 pytest tests/train/test_golden.py` writes the files anew, when a change is meant.
"""

import os
from pathlib import Path

import pytest

from moeflow.config.folders import locate
from tests.train.runs import moeflow, rows

FOLDER = Path(__file__).parent.parent / "golden"
RECIPES = sorted(path.stem for path in Path(locate("recipes")).glob("*.yaml"))
STEPS = 20
# Another processor adds in another order, and training enlarges the difference.
EARLY, LATE = 1e-4, 2e-3


def run(recipe: str, folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of the recipe as it is, on data that are the same everywhere, in one process with one thread."""
    moeflow(
        *("train", f"+recipe={recipe}", "data.source=synthetic", f"trainer.max_steps={STEPS}", "trainer.log_every=1"),
        *("trainer.eval_batches=1", "launch.processes=1", "parallel.ep=1", "launch.device=cpu", "launch.threads=1"),
        f"run.dir={folder}",
        timeout=200,
    )
    return [(row["step"], row["loss"]) for row in rows(folder) if "loss" in row]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_losses_are_those_on_file(recipe, tmp_path):
    found = run(recipe, tmp_path / "run")
    path = FOLDER / f"{recipe}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text("".join(f"{step:>2} {loss:.6f}\n" for step, loss in found))
    expected = [(int(step), float(loss)) for step, loss in map(str.split, path.read_text().splitlines())]
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    for (step, loss), (_, golden) in zip(found, expected, strict=True):
        assert loss == pytest.approx(golden, rel=EARLY if step <= 10 else LATE), f"step {step}"


def test_no_golden_file_is_left_of_a_recipe_that_is_gone():
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == RECIPES
