"""A checkpoint of one layout goes on on any other: parameters, optimizer state, samples and the gate's bias."""

import shutil

import pytest

from moeflow.train.checkpoint import CheckpointStore
from tests.train.layouts import PLACES, SAVED_AT, largest_difference, reference, resumed, run
from tests.train.test_runs import saved_tensors

BY_NAME = {place.name: place for place in PLACES}
SAMPLE = [
    ("1 process", "tp=2 x ep=2"),
    ("tp=2 x ep=2", "pp=2 x ep=2"),
    ("pp=2 x ep=2", "etp=2"),
    ("etp=2", "DeepSpeed ZeRO-1, ep=2"),
    ("DeepSpeed ZeRO-1, ep=2", "FSDP2, ep=2"),
    ("FSDP2, ep=2", "1 process"),
]


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    return reference(tmp_path_factory.mktemp("reference") / "run")


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """Name of a place -> folder of a run that stopped there; made when first asked for."""
    folder, made = tmp_path_factory.mktemp("saved"), {}

    def get(name):
        if name not in made:
            made[name] = folder / f"run{len(made)}"
            run(BY_NAME[name], made[name], stop_at=SAVED_AT)
        return made[name]

    return get


def check(saved, place, losses, folder):
    assert largest_difference(resumed(saved, place, folder), losses[SAVED_AT:]) < 1e-5


@pytest.mark.distributed
@pytest.mark.parametrize(("source", "target"), SAMPLE, ids=[f"{a} -> {b}" for a, b in SAMPLE])
def test_ten_losses_after_a_change_of_layout(source, target, losses, saved_by, tmp_path):
    check(saved_by(source), BY_NAME[target], losses, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("target", list(BY_NAME))
@pytest.mark.parametrize("source", list(BY_NAME))
def test_ten_losses_after_every_change_of_layout(source, target, losses, saved_by, tmp_path):
    check(saved_by(source), BY_NAME[target], losses, tmp_path / "run")


@pytest.mark.distributed
def test_every_layout_saves_the_same_keys_shapes_and_values(saved_by):
    whole = saved_tensors(saved_by("1 process"), SAVED_AT)
    assert any(key.endswith("experts.w_in/exp_avg") for key in whole)
    for name in ("tp=2 x ep=2", "pp=2 x ep=2", "etp=2", "DeepSpeed ZeRO-1, ep=2", "FSDP2, ep=2"):
        other = saved_tensors(saved_by(name), SAVED_AT)
        assert {k: (v.shape, v.dtype) for k, v in other.items()} == {k: (v.shape, v.dtype) for k, v in whole.items()}
        for key, value in whole.items():
            assert (other[key].float() - value.float()).norm() <= 1e-4 * value.float().norm() + 1e-9, (name, key)


@pytest.mark.parametrize("lost", ["optimizer/", "gate.selection_bias_E"])
def test_the_losses_would_tell(lost, losses, saved_by, tmp_path):
    """Without the optimizer's state, or without the gate's, the next losses are others."""
    folder = tmp_path / "run"
    shutil.copytree(saved_by("1 process"), folder)
    store = CheckpointStore(folder / "checkpoints")
    tensors = saved_tensors(folder, SAVED_AT)
    assert any(lost in key for key in tensors)
    for key, value in tensors.items():
        if lost in key and not key.endswith("/step"):
            value.zero_()
    store.save(SAVED_AT, tensors, store.load_local(SAVED_AT), store.read_meta(SAVED_AT))
    store.close()
    changed = run(BY_NAME["1 process"], folder, resume=True)
    assert largest_difference(changed[SAVED_AT:], losses[SAVED_AT:]) > 1e-4
