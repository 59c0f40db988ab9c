"""SIGTERM while a long evaluation runs: the run saves at once, and the next life makes up for the evaluation."""

import dataclasses
import os
import shutil
import signal

import pytest

from moeflow.schema import CheckpointConfig
from tests.distributed import run_ranks
from tests.parallel.gpt_run import config_of
from tests.train.runs import rows
from tests.train.test_runs import saved_tensors


def life(folder, parallel, steps, signalled, resume):
    """Train; rank 0 is sent SIGTERM at the second batch of its first evaluation, which has many more."""
    from moeflow.train import evaluate, job

    plain = evaluate.eval_batches
    seen = 0

    def batches(*args, **kwargs):
        nonlocal seen
        for batch in plain(*args, **kwargs):
            seen += 1
            if signalled and seen == 2 and int(os.environ.get("RANK", 0)) == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    evaluate.eval_batches = batches
    job.sample_at_end = lambda session: None  # a text after the last step would take longest of all
    config = config_of(parallel, checkpoint=CheckpointConfig(every=2))
    trainer = dataclasses.replace(config.trainer, max_steps=steps, log_every=1, eval_every=3, eval_batches=20)
    config = dataclasses.replace(config, trainer=trainer, data=dataclasses.replace(config.data, eval_batch_size=16))
    summary = job.train(config, folder, resume)
    return summary, seen


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "parallel", "steps"), [(1, {}, 3), (2, {"ep": 2}, 5)])
def test_the_evaluation_is_made_up_for(tmp_path, world, parallel, steps):
    """At the run's last step, and in the middle."""
    one, other = tmp_path / "stopped", tmp_path / "unbroken"
    one.mkdir(), other.mkdir()
    stopped = run_ranks(life, world, str(one), parallel, steps, True, False, timeout=90, init=False)
    for summary, seen in stopped:
        assert (summary["status"], summary["step"], summary["exit_code"]) == ("interrupted", 3, 128 + signal.SIGTERM)
        assert seen < 15
    kept = shutil.copytree(one, tmp_path / "kept")
    assert not any("eval/loss" in row for row in rows(kept))
    ended = run_ranks(life, world, str(one), parallel, steps, False, True, timeout=90, init=False)
    assert ended[0][0]["status"] == "finished"
    run_ranks(life, world, str(other), parallel, steps, False, False, timeout=90, init=False)
    assert rows(one) == rows(other)
    made_up, whole = saved_tensors(one, steps), saved_tensors(other, steps)
    assert all(value.equal(made_up[name]) for name, value in whole.items())
