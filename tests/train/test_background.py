"""checkpoint.background: the same files, and training that does not wait."""

import pytest

from moeflow.train.checkpoint import CheckpointStore, Keep
from tests.train.runs import train
from tests.train.test_checkpoint import save_small, small
from tests.train.test_runs import assert_same_run


def steps(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))


@pytest.mark.distributed
def test_a_run_saves_the_same_in_the_background(tmp_path):
    always = ["trainer.max_steps=9", "checkpoint.every=2", "trainer.eval_every=4"]
    always += ["launch.processes=2", "parallel.ep=2"]
    train(tmp_path / "waits", *always)
    train(tmp_path / "background", *always, "checkpoint.background=true")
    assert_same_run(tmp_path / "waits", tmp_path / "background", 9)
    assert steps(tmp_path / "background") == steps(tmp_path / "waits")
    assert len(steps(tmp_path / "waits")) in (2, 3)


@pytest.mark.parametrize("wait", [True, False])
def test_pruning_comes_with_the_save(tmp_path, wait):
    store = CheckpointStore(tmp_path)
    save_small(store, 1, loss=0.5)
    for step in (2, 3, 4):
        store.save(step, small(step), {}, {"metrics": {"loss": step}}, wait=wait, keep=Keep(1, 1, "loss", "min"))
    store.close()
    assert store.steps() == [1, 4]
