"""Batches of one rank, in an order that is a pure function of (seed, global batch size, step).

Ranks of one model-parallel group pass the same `dp_rank` and so read the same samples.  Legend: B samples of a batch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from moeflow.data import counter
from moeflow.data.bundle import Dataset
from moeflow.errors import ConfigError, DataError

_STREAM = 0x0DE4


@dataclass(frozen=True)
class Request:
    """One batch that is asked of a data set: sample ids, how many of them (the first ones) count, and the epoch."""

    ids: list[int]
    num_valid: int
    epoch: int


def train_batches(
    dataset: Dataset,
    *,
    micro_batch: int,
    dp_size: int,
    dp_rank: int,
    seed: int,
    start: int = 0,
    device: torch.device | str = "cpu",
    grad_accum: int = 1,
    num_workers: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Iterate over this rank's micro-batches, forever.

    Each epoch is shuffled by (seed, epoch) and cut into global batches of micro_batch * dp_size * grad_accum samples;
    what is left over is dropped.  So the samples of an optimizer step are the same set for every layout with the same
    global batch.

    Args:
        dataset: the training data.
        micro_batch: B, samples of one micro-batch on this rank.
        dp_size: data-parallel ranks.
        dp_rank: of this rank.
        seed: of the run.
        start: micro-steps done before; the iterator goes on exactly there, also in the middle of an epoch.
        device: of the batches.
        grad_accum: micro-batches of one optimizer step.
        num_workers: processes that prepare batches ahead; they change nothing but time.

    Returns:
        Iterator over {"inputs", "targets", "ids": int64 [B] (indices into the data set)}.

    Raises:
        ConfigError: at once, when a global batch is larger than the data set.
        DataError: from the iterator, when a worker process died.
    """
    sampler = _TrainSampler(
        len(dataset),
        micro_batch=micro_batch,
        dp_size=dp_size,
        dp_rank=dp_rank,
        seed=seed,
        start=start,
        grad_accum=grad_accum,
    )
    return _batches(dataset, sampler, torch.device(device), num_workers)


def eval_batches(
    dataset: Dataset,
    *,
    batch: int,
    dp_size: int,
    dp_rank: int,
    max_batches: int | None = None,
    device: torch.device | str = "cpu",
    num_workers: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Iterate over this rank's part of the evaluation set, once, in order.

    Args:
        dataset: the evaluation data.
        batch: samples of one batch over all ranks (data.eval_batch_size), at most the whole set; each rank gets
            B = ceil(batch / dp_size).
        dp_size: data-parallel ranks.
        dp_rank: of this rank.
        max_batches: stop after so many; None takes the whole set.
        device: of the batches.
        num_workers: processes that prepare batches ahead.

    Returns:
        Iterator over {"inputs", "targets", "ids": int64 [B], "valid": bool [B]}.  Every rank gets equally many batches
        of the same B.  Rows that are not valid repeat a sample so that B stays; leave them out of every sum.  They come
        last in the batch.  Over all ranks each sample is valid exactly once, for any `dp_size`.

    Raises:
        DataError: from the iterator, when a worker process died.
    """
    sampler = _EvalSampler(len(dataset), batch=batch, dp_size=dp_size, dp_rank=dp_rank, max_batches=max_batches)
    return _batches(dataset, sampler, torch.device(device), num_workers, with_valid=True)


def micro_steps_per_epoch(num_samples: int, *, micro_batch: int, dp_size: int, grad_accum: int = 1) -> int:
    """Return how many micro-batches each rank takes from one epoch: whole optimizer steps only.

    Raises:
        ConfigError: the data set is smaller than one global batch.
    """
    global_batch = micro_batch * dp_size * grad_accum
    if global_batch > num_samples:
        raise ConfigError(
            f"data.batch_size={global_batch} ({micro_batch} a micro-batch x {dp_size} data-parallel ranks x "
            f"trainer.grad_accum={grad_accum}) is more than the {num_samples} training samples",
            f"pass data.batch_size={num_samples} or less, or more samples (data.train_samples)",
        )
    return num_samples // global_batch * grad_accum


class _TrainSampler(Sampler[Request]):
    """Endless requests of one rank; torch's DistributedSampler shuffles and shards each epoch."""

    def __init__(
        self, num_samples: int, *, micro_batch: int, dp_size: int, dp_rank: int, seed: int, start: int, grad_accum: int
    ):
        self._per_epoch = micro_steps_per_epoch(
            num_samples, micro_batch=micro_batch, dp_size=dp_size, grad_accum=grad_accum
        )
        self._micro_batch, self._start = micro_batch, start
        # The sampler adds the epoch to the seed: scrambled, or else epoch 1 of seed 0 would be epoch 0 of seed 1.
        self._shards: DistributedSampler[int] = DistributedSampler(
            range(num_samples),  # type: ignore[arg-type]  # its length is all that is used
            num_replicas=dp_size,
            rank=dp_rank,
            shuffle=True,
            seed=counter.key(seed, _STREAM) >> 2,
            drop_last=True,
        )

    def __iter__(self) -> Iterator[Request]:
        first_epoch, first = divmod(self._start, self._per_epoch)
        for epoch in count(first_epoch):
            self._shards.set_epoch(epoch)
            batches = BatchSampler(self._shards, self._micro_batch, drop_last=True)
            for ids in islice(batches, first, self._per_epoch):
                yield Request(ids, len(ids), epoch)
            first = 0


class _EvalSampler(Sampler[Request]):
    """Requests of one rank for the whole set in order, padded to equal sizes."""

    def __init__(self, num_samples: int, *, batch: int, dp_size: int, dp_rank: int, max_batches: int | None):
        # A batch beyond the set would be filled up with repeats that count for nothing.
        self._num_samples, self._batch = num_samples, min(batch, num_samples)
        self._share = -(-self._batch // dp_size)
        self._dp_rank = dp_rank
        whole = -(-num_samples // self._batch)
        self._num_batches = whole if max_batches is None else min(whole, max_batches)

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Request]:
        for number in range(self._num_batches):
            stop = min((number + 1) * self._batch, self._num_samples)
            first = min(number * self._batch + self._dp_rank * self._share, stop)
            ids = list(range(first, min(first + self._share, stop)))
            padding = [ids[-1] if ids else 0] * (self._share - len(ids))
            yield Request(ids + padding, len(ids), epoch=0)


class _View(torch.utils.data.Dataset[Any]):
    """Shows a data set to torch's DataLoader, which asks for whole batches through `__getitems__`."""

    def __init__(self, dataset: Dataset, with_valid: bool):
        self._dataset, self._with_valid = dataset, with_valid

    def __getitems__(self, request: Request) -> dict[str, Tensor]:
        ids = torch.tensor(request.ids, dtype=torch.int64)
        batch = self._dataset.fetch(ids, request.epoch)
        batch["ids"] = ids
        if self._with_valid:
            batch["valid"] = torch.arange(len(ids)) < request.num_valid
        return batch


def _batches(
    dataset: Dataset, sampler: Sampler[Request], device: torch.device, num_workers: int, with_valid: bool = False
) -> Iterator[dict[str, Tensor]]:
    on_cuda = device.type == "cuda"
    loader: DataLoader[Any] = DataLoader(
        _View(dataset, with_valid),
        batch_sampler=sampler,  # type: ignore[arg-type]  # requests in place of lists of ids
        collate_fn=_as_it_is,  # type: ignore[arg-type]  # `__getitems__` has made the batch already
        num_workers=num_workers,
        pin_memory=on_cuda,
        worker_init_fn=_ignore_interrupts,
        # Without one of its own, each new iterator would draw from torch's global generator.
        generator=torch.Generator(),
    )
    try:
        for batch in _quiet(loader):
            yield {name: value.to(device, non_blocking=on_cuda) for name, value in batch.items()}
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            f"a data worker of data.num_workers={num_workers} died: {str(error).splitlines()[0]}",
            "workers die when memory or /dev/shm runs out; pass fewer, or data.num_workers=0",
        ) from error


def _quiet(loader: DataLoader[Any]) -> Iterator[dict[str, Tensor]]:
    """Start the loader's iterator without its SIGCHLD handler.

    That handler reports a dead worker by raising out of whatever line the main thread happens to run.  Without it the
    iterator itself finds the dead worker within five seconds, when the next batch does not come.
    """
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    batches = iter(loader)
    if signal.getsignal(signal.SIGCHLD) is not before:
        signal.signal(signal.SIGCHLD, before)
    return batches


def _as_it_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


def _ignore_interrupts(worker: int) -> None:
    """Ctrl-C reaches every process of the terminal: the trainer saves before it ends the workers, so they must live."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
