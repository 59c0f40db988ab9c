"""Checkpoints that a kill at any moment cannot spoil, readable by any number of ranks.

    step_00000100/manifest.json                 sizes and checksums of the files below
    step_00000100/meta.json                     step, tokens seen, metrics, layout, versions
    step_00000100/.metadata, __RANK_0.distcp    tensors by global name (torch.distributed.checkpoint)
    step_00000100/local/rank_00000.safetensors  one rank's own state (random generators)

A save writes aside and syncs; each rank adds the checksums of its own files to the manifest; rank 0 renames the folder
and then moves `latest`.  docs/checkpoints.md walks through a crash at each of these moments.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moeflow.errors import CheckpointError
from moeflow.parallel.collectives import gather_objects
from moeflow.parallel.control import control_group
from moeflow.parallel.topology import Group
from moeflow.train import manifest, shards
from moeflow.train.agreement import Agreement
from moeflow.train.files import json_bytes, write_synced
from moeflow.train.shelf import META, Shelf


@dataclass(frozen=True)
class Keep:
    """What `CheckpointStore.prune` keeps; see its arguments."""

    last: int
    best: int
    metric: str = "eval/accuracy"
    direction: str = "max"


class SaveHandle:
    """A save under way."""

    def __init__(self, step: int, future: Future[None] | None = None):
        self.step = step
        self._future = future

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._future is None or self._future.done()

    def wait(self) -> None:
        """Block until the checkpoint is complete on disk.

        Raises:
            CheckpointError: it could not be written; the last good checkpoint is untouched.  Raised once.
        """
        future, self._future = self._future, None
        if future is not None:
            future.result()


class CheckpointStore:
    """The checkpoints of one run.

    The constructor, `claim`, `save`, `wait`, `load`, `verify`, `rewind` and `prune` are collective: every rank calls
    them at the same place, and a failure of one rank is raised on all.  The other methods only read, alone.

    Args:
        folder: where the checkpoints are; made at the first save, on storage that all ranks share.
        process_group: CPU group of all ranks; None makes one where torch.distributed runs with several ranks.
        rank: rank of this process.
        world: number of ranks.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        process_group: dist.ProcessGroup | None = None,
        rank: int = 0,
        world: int = 1,
    ):
        self.folder = Path(folder)
        self.rank = rank
        self.world = world
        group = Group("control", (0,), 0) if world == 1 else control_group(process_group)
        assert world == 1 or (group.rank, group.size) == (rank, world), (
            "rank and world are not those of torch.distributed"
        )
        self._ranks = Agreement(group, self.folder)
        self._shelf = Shelf(folder)
        self._pending = SaveHandle(step=-1)
        self._thread: ThreadPoolExecutor | None = None
        self._stager: Any = None

    # --- reading -----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, rising."""
        return self._shelf.steps()

    def latest(self) -> int | None:
        """Return the step to go on from, or None when nothing was saved."""
        return self._shelf.latest()

    def choose(self, step: int | None) -> int:
        """Return `step` where there is a checkpoint of it, the latest one where it is None.

        Raises:
            CheckpointError: there is none.
        """
        return self._shelf.choose(step)

    def best(self, metric: str = "eval/accuracy", direction: str = "max") -> int | None:
        """Return the step whose `meta["metrics"][metric]` is best, or None when no checkpoint has it."""
        ranked = self._shelf.ranked(metric, direction)
        return ranked[0] if ranked else None

    def read_meta(self, step: int) -> dict[str, Any]:
        """Return the JSON given to `save`, with `step` and `world` added."""
        return self._shelf.meta(step)

    def load_local(self, step: int, rank: int | None = None) -> dict[str, Any]:
        """Return the `local` that a rank (this one by default) gave to `save`.

        Raises:
            CheckpointError: it is damaged, or the checkpoint was made by fewer ranks.
        """
        rank = self.rank if rank is None else rank
        folder = self._shelf.path(step)
        world = manifest.read(folder)["world"]
        if rank >= world:
            raise CheckpointError(f"checkpoint {folder} was saved by {world} ranks; it has no state of rank {rank}")
        return shards.read_local(folder / _local_name(rank))

    def verify(self, step: int) -> None:
        """Compare every file of a checkpoint with the manifest; ranks share the reading.

        Raises:
            CheckpointError: on every rank; names the damaged files and the newest earlier step that is good.
        """
        try:
            self._ranks.all(self._shelf.faults, step, self.rank, self.world)
        except CheckpointError as exc:
            # Only after a failure, so that a good resume never reads the older checkpoints.
            way_out = self._ranks.first(self._shelf.way_out, step)
            raise CheckpointError(exc.what, exc.mend or way_out) from None

    def load(self, step: int, tensors: dict[str, torch.Tensor], *, verify: bool = True, strict: bool = True) -> None:
        """Fill `tensors` in place, whatever number of ranks and placements they were saved with.

        Args:
            step: a step of `steps()`.
            tensors: as in `save`; shapes and dtypes have to be those of the checkpoint.
            verify: compare all checksums first.
            strict: every key of the checkpoint has to be wanted by some rank; False allows to read a part of them.

        Raises:
            CheckpointError: on every rank; damage, or keys, shapes and dtypes that do not fit.  `tensors` are
                untouched then, unless the disk fails in the middle of the reading.
        """
        self.wait()
        if verify:
            self.verify(step)
        asked = {key for keys in gather_objects(list(tensors), self._ranks.group) for key in keys}
        self._ranks.all(self._match, step, tensors, asked if strict else None)
        shards.read_tensors(self._shelf.path(step), tensors, self._ranks.group.process_group)

    def _match(self, step: int, tensors: dict[str, torch.Tensor], asked: set[str] | None) -> None:
        folder = self._shelf.path(step)
        if found := shards.mismatches(shards.read_index(folder), tensors, asked):
            more = f" (and {len(found) - 5} more)" if len(found) > 5 else ""
            raise CheckpointError(
                f"checkpoint {folder} does not fit the model: {'; '.join(found[:5])}{more}",
                "use the model settings that the checkpoint was made with (config.yaml of its run folder)",
            )

    # --- writing -----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        local: dict[str, Any],
        meta: dict[str, Any],
        *,
        wait: bool = True,
        keep: Keep | None = None,
    ) -> SaveHandle:
        """Write the checkpoint of `step` and make it the latest.

        Args:
            step: optimizer steps done.
            tensors: by global name.  A DTensor describes a shard; a plain tensor is the same on every rank that has
                it, and one of them writes it.  Ranks may hold different keys.
            local: this rank's small state: tensors and plain JSON values.
            meta: JSON for `read_meta` (rank 0's counts); `meta["metrics"]` is what `prune` picks the best by.
            wait: False copies the tensors to CPU memory and writes in a thread; the next save waits for it.
            keep: what to prune by once the checkpoint is complete; None keeps all.

        Returns:
            A handle whose `wait()` raises what went wrong in the thread.

        Raises:
            CheckpointError: on every rank, naming path and cause; checkpoints that were complete stay as they are.
        """
        self.wait()
        if wait:
            self._save(step, tensors, local, meta, keep)
            self._pending = SaveHandle(step)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            job = (step, self._stage(tensors), *copy.deepcopy((local, meta)), keep)
            self._pending = SaveHandle(step, self._thread.submit(self._save, *job))
        return self._pending

    def wait(self) -> None:
        """Wait for a save that runs in the background, and raise its error (once)."""
        self._pending.wait()

    def close(self) -> None:
        """Wait for the background save and let another run have the folder."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            self._shelf.release()

    def claim(self) -> None:
        """Keep every other run out of the folder until `close` or the end of this process; `save` does it too.

        Raises:
            CheckpointError: on every rank; a live run holds the folder.
        """
        self._ranks.first(self._shelf.claim)

    def rewind(self, step: int) -> None:
        """Make `step` the latest, as a run does that goes on from an earlier checkpoint.

        Later checkpoints are no longer part of the run: `prune` removes them after the next save.
        """
        self.wait()
        self._ranks.first(self._shelf.point, step)

    def prune(self, keep_last: int, keep_best: int, metric: str = "eval/accuracy", direction: str = "max") -> list[int]:
        """Delete checkpoints that no rule keeps, and those of steps after the latest one (left by `rewind`).

        Args:
            keep_last: number of newest ones kept; the latest is always kept.
            keep_best: number kept beside them by `meta["metrics"][metric]`.
            metric: key in the metrics; a checkpoint without it is not among the best.
            direction: "max" or "min".

        Returns:
            The steps removed.  A folder that the system does not let go is left for the next save, with a warning.
        """
        self.wait()
        return self._prune(Keep(keep_last, keep_best, metric, direction))

    def _prune(self, keep: Keep) -> list[int]:
        return self._ranks.first(self._shelf.prune, keep.last, keep.best, keep.metric, keep.direction)

    def _save(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        local: dict[str, Any],
        meta: dict[str, Any],
        keep: Keep | None,
    ) -> None:
        self._write(step, tensors, local, meta)
        if keep is not None:
            self._prune(keep)

    def _write(self, step: int, tensors: dict[str, torch.Tensor], local: dict[str, Any], meta: dict[str, Any]) -> None:
        aside = self._shelf.aside(step)
        self._ranks.first(self._shelf.begin, step)
        try:
            shards.write_tensors(aside, tensors, self._ranks.group.process_group)
            files: dict[str, Any] = {}
            for part in self._ranks.all(self._write_own, aside, step, local, meta):
                files.update(part)
            self._ranks.first(self._publish, step, files)
        except CheckpointError:
            if self.rank == 0:
                self._shelf.give_up(step)
            raise

    def _write_own(self, aside: Path, step: int, local: dict[str, Any], meta: dict[str, Any]) -> dict[str, Any]:
        """Write what is this rank's beside its tensors; return the manifest entries of all files it wrote."""
        path = aside / _local_name(self.rank)
        path.parent.mkdir(exist_ok=True)
        shards.write_local(path, local)
        mine = [path, *aside.glob(f"__{self.rank}_*")]
        if self.rank == 0:
            write_synced(aside / META, json_bytes({**meta, "step": step, "world": self.world}))
            mine += [aside / META, aside / shards.INDEX]
        return manifest.entries(aside, mine)

    def _publish(self, step: int, files: dict[str, Any]) -> None:
        aside = self._shelf.aside(step)
        unseen = [name for name, entry in files.items() if not _has_size(aside / name, entry["bytes"])]
        if unseen:
            raise CheckpointError(
                f"rank 0 does not see what other ranks wrote to {aside}: {', '.join(unseen[:5])}",
                "put the run folder on storage that all machines share (run.root, run.dir)",
            )
        manifest.write(aside, step, self.world, files)
        self._shelf.publish(step)

    def _stage(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a copy of `tensors` in CPU memory (kept for the next save) that training cannot change any more."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        if self._stager is None:
            cuda = torch.cuda.is_available()
            self._stager = DefaultStager(StagingOptions(cuda, False, False, cuda))
        return self._stager.stage({key: tensor.detach() for key, tensor in tensors.items()})


def _local_name(rank: int) -> str:
    return f"local/rank_{rank:05d}.safetensors"


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
