"""The order of samples: over epochs, ranks, accumulation, workers and resumes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor

from moeflow.data import build, loader
from moeflow.errors import ConfigError, DataError
from moeflow.schema import CifarData


class Numbers:
    """Samples whose content says which they are, and of which epoch."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def fetch(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        return {"inputs": indices.float() + 1000 * epoch, "targets": indices * 10}


def train(size: int, micro_batch: int, *, seed: int = 0, **options) -> Iterator[dict[str, Tensor]]:
    defaults = {"dp_size": 1, "dp_rank": 0}
    return loader.train_batches(Numbers(size), micro_batch=micro_batch, seed=seed, **{**defaults, **options})


def ids_of(batches: Iterator[dict[str, Tensor]], count: int) -> list[list[int]]:
    return [batch["ids"].tolist() for batch in islice(batches, count)]


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def test_batches_carry_their_samples():
    for number, batch in enumerate(islice(train(50, 8), 13)):  # six batches an epoch
        assert set(batch) == {"inputs", "targets", "ids"}
        assert batch["ids"].dtype == torch.int64
        assert torch.equal(batch["targets"], batch["ids"] * 10)
        assert torch.equal(batch["inputs"], batch["ids"].float() + 1000 * (number // 6))


def test_an_epoch_is_a_permutation_cut_off_at_whole_batches():
    batches = train(103, 10)
    epochs = [flat(ids_of(batches, 10)) for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 100
        assert set(epoch) <= set(range(103))
        assert epoch != sorted(epoch)
    assert epochs[0] != epochs[1] != epochs[2]


def test_seeds_do_not_share_epochs():
    """DistributedSampler adds the epoch to its seed: taken as it is, epoch 1 of seed 0 would be epoch 0 of seed 1."""
    epochs = [tuple(flat(ids_of(train(40, 10, seed=seed), 8))) for seed in range(4)]
    halves = [part for epoch in epochs for part in (epoch[:40], epoch[40:])]
    assert len(set(halves)) == 8
    assert ids_of(train(40, 10, seed=3), 8) == ids_of(train(40, 10, seed=3), 8)


@pytest.mark.parametrize("size", [96, 100, 127])
def test_the_samples_of_a_step_do_not_depend_on_the_layout(size: int):
    """Global batch 24 on every layout of 1 to 8 ranks with and without accumulation, over several epochs."""
    steps = 3 * (size // 24) + 2
    seen = {}
    for dp_size, grad_accum in [(1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (1, 6), (2, 3), (4, 3), (2, 12)]:
        micro_batch = 24 // dp_size // grad_accum
        ranks = [
            ids_of(train(size, micro_batch, dp_size=dp_size, dp_rank=rank, grad_accum=grad_accum), steps * grad_accum)
            for rank in range(dp_size)
        ]
        union = [
            sorted(
                sample
                for rank in ranks
                for batch in rank[step * grad_accum : (step + 1) * grad_accum]
                for sample in batch
            )
            for step in range(steps)
        ]
        assert all(len(set(step)) == 24 for step in union)
        seen[dp_size, grad_accum] = union
    assert all(union == seen[1, 1] for union in seen.values())


@pytest.mark.parametrize("start", [0, 1, 5, 9, 10, 11, 20, 47])
@pytest.mark.parametrize(("dp_size", "grad_accum"), [(1, 1), (2, 1), (2, 5)])
def test_resume_is_exact(start: int, dp_size: int, grad_accum: int):
    options = {"dp_size": dp_size, "dp_rank": dp_size - 1, "grad_accum": grad_accum}
    whole = list(islice(train(105 * dp_size, 10, **options), 60))
    resumed = list(islice(train(105 * dp_size, 10, start=start, **options), 60 - start))
    for before, after in zip(whole[start:], resumed, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_resume_of_augmented_images_is_exact():
    """Also with the draws of the augmentation, in the middle of the second epoch."""
    dataset = build(CifarData(source="synthetic", train_samples=64), seed=5).train
    options = {"micro_batch": 16, "dp_size": 1, "dp_rank": 0, "seed": 5}
    whole = list(islice(loader.train_batches(dataset, **options), 8))
    fresh = build(CifarData(source="synthetic", train_samples=64), seed=5).train
    resumed = list(islice(loader.train_batches(fresh, start=6, **options), 2))
    for before, after in zip(whole[6:], resumed, strict=True):
        assert torch.equal(before["ids"], after["ids"])
        assert torch.equal(before["inputs"], after["inputs"])
    again = {int(i): image for batch in whole[:4] for i, image in zip(batch["ids"], batch["inputs"], strict=True)}
    moved = [
        not torch.equal(again[int(i)], image) for i, image in zip(whole[6]["ids"], whole[6]["inputs"], strict=True)
    ]
    assert sum(moved) > 12  # the second epoch draws anew


def test_the_global_generator_is_left_alone():
    """A resumed run makes its iterator at another time; that must not change dropout or gate noise."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    next(train(30, 10))
    next(loader.eval_batches(Numbers(30), batch=10, dp_size=1, dp_rank=0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(num_workers: int):
    options = {"dp_size": 2, "dp_rank": 1, "start": 3}
    alone = list(islice(train(100, 7, **options), 25))
    batches = train(100, 7, num_workers=num_workers, **options)
    for expected, batch in zip(alone, batches, strict=False):
        assert all(torch.equal(expected[name], batch[name]) for name in expected)
    batches.close()  # type: ignore[attr-defined]
    checked = [
        list(loader.eval_batches(Numbers(23), batch=4, dp_size=1, dp_rank=0, num_workers=workers))
        for workers in (0, num_workers)
    ]
    for expected, batch in zip(*checked, strict=True):
        assert all(torch.equal(expected[name], batch[name]) for name in expected)


class Killer(Numbers):
    """A sample that ends the process that makes it, as the system does when memory runs out."""

    deadly = -1

    def fetch(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        if self.deadly in indices.tolist():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fetch(indices, epoch)


def test_a_dying_worker_is_a_clear_error_from_the_iterator():
    before = signal.getsignal(signal.SIGCHLD)
    dataset = Killer(80)
    # Workers are ahead by up to 4 batches of 5 read ones: the tenth is asked for when the sixth is.
    dataset.deadly = ids_of(train(80, 4), 10)[9][0]
    batches = loader.train_batches(dataset, micro_batch=4, dp_size=1, dp_rank=0, seed=0, num_workers=2)
    got = ids_of(batches, 5)
    assert signal.getsignal(signal.SIGCHLD) is before
    got += ids_of(batches, 1)
    time.sleep(1.0)  # the worker dies meanwhile: nothing may be raised out of this line
    with pytest.raises(DataError, match=r"a data worker of data\.num_workers=2 died: DataLoader worker \(pid"):
        got += ids_of(batches, 10)
    assert got[:6] == ids_of(train(80, 4), 6)
    assert len(got) == 6


class Faulty(Numbers):
    def fetch(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        raise DataError("the disk is gone", "find it")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_set_comes_through(num_workers: int):
    batches = loader.train_batches(Faulty(40), micro_batch=4, dp_size=1, dp_rank=0, seed=0, num_workers=num_workers)
    with pytest.raises(DataError, match="the disk is gone"):
        next(batches)


def test_workers_outlive_an_interrupt_of_the_terminal():
    """Ctrl-C goes to every process of the terminal; the trainer then still finishes its step and saves."""
    batches = loader.train_batches(WhoAmI(1000), micro_batch=4, dp_size=1, dp_rank=0, seed=0, num_workers=2)
    workers = {int(next(batches)["targets"][0]) for _ in range(4)}
    assert os.getpid() not in workers
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker, signal.SIGINT)
    time.sleep(0.2)
    assert {int(next(batches)["targets"][0]) for _ in range(20)} == workers
    batches.close()  # type: ignore[attr-defined]


class WhoAmI(Numbers):
    def fetch(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        return {"inputs": indices.float(), "targets": torch.full_like(indices, os.getpid())}


@pytest.mark.parametrize(("micro_batch", "dp_size", "grad_accum"), [(11, 1, 1), (4, 3, 1), (2, 2, 3)])
def test_a_batch_larger_than_the_data_is_refused_at_once(micro_batch: int, dp_size: int, grad_accum: int):
    total = micro_batch * dp_size * grad_accum
    with pytest.raises(ConfigError, match=f"data.batch_size={total} .* is more than the 10 training samples") as caught:
        train(10, micro_batch, dp_size=dp_size, grad_accum=grad_accum)
    assert "data.batch_size=10 or less" in str(caught.value)


def test_micro_steps_per_epoch():
    assert loader.micro_steps_per_epoch(50_000, micro_batch=64, dp_size=2) == 390
    assert loader.micro_steps_per_epoch(50_000, micro_batch=32, dp_size=2, grad_accum=2) == 780
    assert loader.micro_steps_per_epoch(50_000, micro_batch=50_000, dp_size=1) == 1


@pytest.mark.parametrize("size", [1, 7, 24, 25, 100])
@pytest.mark.parametrize("batch", [1, 5, 24, 30])
@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
def test_evaluation_counts_each_sample_once_on_every_layout(size: int, batch: int, dp_size: int):
    ranks = [
        list(loader.eval_batches(Numbers(size), batch=batch, dp_size=dp_size, dp_rank=rank)) for rank in range(dp_size)
    ]
    num_batches = -(-size // batch)
    share = -(-min(batch, size) // dp_size)  # a batch beyond the set is the set, not filled up with repeats
    assert [len(batches) for batches in ranks] == [num_batches] * dp_size
    for number in range(num_batches):
        counted = []
        for batches in ranks:
            ids, valid = batches[number]["ids"], batches[number]["valid"]
            assert valid.dtype == torch.bool
            assert len(ids) == len(valid) == share
            assert not (valid[1:] & ~valid[:-1]).any()  # padding comes last
            counted += ids[valid].tolist()
        assert counted == list(range(number * batch, min((number + 1) * batch, size)))


def test_max_batches_takes_the_same_samples_on_every_layout():
    for dp_size in (1, 2, 4, 5):
        counted = [
            int(sample)
            for rank in range(dp_size)
            for batch in loader.eval_batches(Numbers(100), batch=10, dp_size=dp_size, dp_rank=rank, max_batches=3)
            for sample in batch["ids"][batch["valid"]]
        ]
        assert sorted(counted) == list(range(30))
    assert len(list(loader.eval_batches(Numbers(25), batch=10, dp_size=1, dp_rank=0, max_batches=99))) == 3
