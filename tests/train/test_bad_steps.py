"""Steps that are not finite: left out whole, counted, written down, and an end after some in a row."""

import dataclasses
import itertools
import json
import os

import pytest
import torch

from moeflow.errors import TrainingError
from moeflow.models.lm_task import LanguageModelTask
from moeflow.schema import CheckpointConfig
from moeflow.train.bad_steps import spread_to_gradients
from tests.distributed import RanksFailed, run_ranks
from tests.parallel.gpt_run import config_of
from tests.train.test_runs import saved_tensors


def poisoned(folder, parallel, steps, bad, kind, rank, resume=False, allowed=3):
    """Train; on one rank the loss of the steps `bad` (from 1) is spoilt."""
    os.environ["OMP_NUM_THREADS"] = "1"
    calls = 0
    plain = LanguageModelTask.loss

    def loss(self, logits, batch):
        nonlocal calls
        calls += torch.is_grad_enabled()
        value = plain(self, logits, batch)
        if not torch.is_grad_enabled() or calls not in bad or int(os.environ.get("RANK", 0)) != rank:
            return value
        if kind == "gradient":
            value.register_hook(lambda grad: grad * float("nan"))
            return value
        return value + float(kind)

    LanguageModelTask.loss = loss
    config = config_of(parallel, checkpoint=CheckpointConfig(every=1, keep_last=99))
    trainer = dataclasses.replace(
        config.trainer, max_steps=30, stop_at=steps, log_every=1, eval_every=0, skip_bad_steps=allowed
    )
    from moeflow.train.job import train

    return train(dataclasses.replace(config, trainer=trainer), folder, resume)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "bad_steps.jsonl").read_text().splitlines()]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "world", "parallel"),
    [
        ("nan", 1, {}),
        ("inf", 2, {"ep": 2}),
        ("gradient", 2, {"tp": 2}),
        ("inf", 2, {"pp": 2}),
        ("gradient", 2, {"ep": 2, "engine": "deepspeed", "zero_stage": 2}),
        ("gradient", 2, {"ep": 2, "engine": "fsdp"}),
        *(
            pytest.param(kind, 2, {"ep": 2, "engine": "deepspeed", "zero_stage": stage}, marks=pytest.mark.slow)
            for kind, stage in (("nan", 0), ("nan", 1), ("inf", 2))
        ),
        pytest.param("inf", 4, {"ep": 2, "engine": "fsdp"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value),
)
def test_a_bad_step_changes_nothing(tmp_path, kind, world, parallel):
    # A pipeline calls the loss for each of its two parts, on its last rank.
    calls = {3, 4} if "pp" not in parallel else {5, 7}
    arguments = (str(tmp_path), parallel, 6, calls, kind, world - 1)
    (summary, *_) = run_ranks(poisoned, world, *arguments, timeout=90, init=False)
    assert (summary["status"], summary["step"], summary["bad_steps"]) == ("interrupted", 6, 2)
    states = [saved_tensors(tmp_path, step) for step in range(1, 7)]
    changes = [any(not torch.equal(v, b[k]) for k, v in a.items()) for a, b in itertools.pairwise(states)]
    assert changes == [True, False, False, True, True]
    found = rows_of(tmp_path)
    assert [row["step"] for row in found] == [3, 4]
    assert all(kind == "gradient" or row["loss"] == "NaN" for row in found)
    assert all(row["grad_norm"] in ("NaN", "Infinity") for row in found)
    # Of all data-parallel ranks: the whole batch of 16 windows, each once.
    assert all(len(set(row["ids"])) == len(row["ids"]) == 16 for row in found)
    assert set(found[0]["ids"]) != set(found[1]["ids"])


def test_one_too_many_ends_the_run_on_every_rank(tmp_path):
    with pytest.raises(RanksFailed, match="TrainingError: step 5: the gradient norm is nan, after 2 such steps") as end:
        run_ranks(poisoned, 2, str(tmp_path), {"ep": 2}, 9, {3, 4, 5}, "nan", 1, False, 2, timeout=60, init=False)
    assert str(end.value).count("TrainingError: step 5") == 2
    assert [row["step"] for row in rows_of(tmp_path)] == [3, 4, 5]
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").glob("step_*")) == ["1", "2", "3", "4"]


def test_steps_that_are_done_again_are_listed_once(tmp_path):
    arguments = (str(tmp_path), {}, 4, {1, 4}, "nan", 0)
    (summary,) = run_ranks(poisoned, 1, *arguments, timeout=60, init=False)
    assert summary["bad_steps"] == 2
    with (tmp_path / "bad_steps.jsonl").open("a") as stream:
        stream.write('{"step": 7, "ids": []}\n{"step": 8, "i')
    (summary,) = run_ranks(poisoned, 1, str(tmp_path), {}, 6, {2}, "nan", 0, True, timeout=60, init=False)
    assert summary["bad_steps"] == 3
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 4, 6]


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (1, {}),
        pytest.param(2, {"ep": 2, "engine": "deepspeed", "zero_stage": 0}, marks=pytest.mark.slow),
        pytest.param(2, {"ep": 2, "engine": "deepspeed", "zero_stage": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"ep": 2, "engine": "fsdp"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_before_any_good_step_goes_on(tmp_path, world, parallel):
    run_ranks(poisoned, world, str(tmp_path), parallel, 1, {1}, "nan", 0, timeout=60, init=False)
    assert all(key.startswith("model/") for key in saved_tensors(tmp_path, 1))
    arguments = (str(tmp_path), parallel, 3, set(), "nan", 0, True)
    summary, *_ = run_ranks(poisoned, world, *arguments, timeout=60, init=False)
    assert (summary["step"], summary["bad_steps"]) == (3, 1)
    assert any(key.startswith("optimizer/") for key in saved_tensors(tmp_path, 3))


@pytest.mark.parametrize("value", [2.5, float("inf"), float("-inf"), float("nan")])
def test_gradients_follow_the_loss(value):
    class Task:
        def loss(self, logits, batch):
            return logits.sum() + value

    task = Task()
    spread_to_gradients(task)
    x = torch.ones(3, requires_grad=True)
    loss = task.loss(x, {})
    loss.backward()
    if value == 2.5:
        assert loss.item() == 5.5
        assert torch.equal(x.grad, torch.ones(3))
    else:
        assert loss.isnan()
        assert x.grad.isnan().all()


def test_zero_allowed_ends_at_the_first(tmp_path):
    from moeflow.train.bad_steps import BadSteps

    bad = BadSteps(tmp_path, 0, True)
    with pytest.raises(TrainingError, match="step 7: the gradient norm is inf; the parameters") as end:
        bad.bad(7, 1.0, float("inf"), [4, 5], "lower optim.lr")
    assert end.value.mend == "lower optim.lr"
    assert rows_of(tmp_path) == [{"step": 7, "loss": 1.0, "grad_norm": "Infinity", "ids": [4, 5]}]
