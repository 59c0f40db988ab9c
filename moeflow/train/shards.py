"""Tensors on disk: torch.distributed.checkpoint (DCP) with errors that ranks agree on and no arbitrary pickles.

DCP lays every tensor out by its global name and the place of each shard, so a reader may have another number of
ranks.  Its index file `.metadata` is a pickle; it is read by an unpickler that admits DCP's own record types alone.
"""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from moeflow.errors import CheckpointError, did_you_mean
from moeflow.train.agreement import disk_error
from moeflow.train.files import write_synced

INDEX = ".metadata"
_RECORDS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's index")


class _Writer(FileSystemWriter):
    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as exc:
            # torch.save hides a failed write behind an internal check; the cause is lost once it travels between ranks.
            if isinstance(exc.__context__, OSError):
                raise exc.__context__ from None
            raise

    def storage_meta(self) -> StorageMeta:
        # By default the absolute path of the folder, as a pickled Path that other Pythons cannot read.
        return StorageMeta()


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_index(Path(self.path))


def read_index(folder: Path) -> Metadata:
    """Return DCP's index of a checkpoint folder: global shapes, dtypes and where the shards are.

    Raises:
        CheckpointError: the index is missing, damaged or holds something else.
    """
    path = folder / INDEX
    try:
        with open(path, "rb") as stream:
            index = _IndexUnpickler(stream).load()
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror}") from exc
    except Exception as exc:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path} is damaged: {exc}") from exc
    if not isinstance(index, Metadata):
        raise CheckpointError(f"{path} is damaged: it holds a {type(index).__name__}")
    return index


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Write every rank's share of `tensors` into `folder`, synced.  Collective over `group`.

    Raises:
        CheckpointError: on every rank, when one of them failed.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _quiet()
    try:
        save(
            dict(tensors),
            storage_writer=_Writer(folder, sync_files=True),
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as exc:
        raise _from_dcp(f"checkpoint {folder} was not written", exc) from exc


def read_tensors(folder: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill `tensors` (plain or DTensor) in place.  Collective over `group`.

    Raises:
        CheckpointError: on every rank, when one of them failed.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    _quiet()
    try:
        load(
            dict(tensors),
            storage_reader=_Reader(folder),
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as exc:
        raise _from_dcp(f"checkpoint {folder} was not read", exc) from exc


def mismatches(index: Metadata, wanted: dict[str, torch.Tensor], asked_by_any: set[str] | None) -> list[str]:
    """Return one sentence for each key that does not fit.

    Args:
        index: what the checkpoint holds.
        wanted: tensors that this rank wants filled.
        asked_by_any: keys that some rank wants; those in the checkpoint alone are reported.  None allows them.
    """
    held = index.state_dict_metadata
    found = []
    for key, tensor in wanted.items():
        entry = held.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            found.append(f"'{key}' is not in the checkpoint.{did_you_mean(key, held)}")
        elif entry.size != tensor.shape:
            found.append(f"'{key}' is {list(entry.size)} in the checkpoint and {list(tensor.shape)} in the model")
        elif entry.properties.dtype != tensor.dtype:
            found.append(f"'{key}' is {entry.properties.dtype} in the checkpoint and {tensor.dtype} in the model")
    if asked_by_any is not None:
        unused = sorted(set(held) - asked_by_any)
        found += [f"'{key}' is in the checkpoint alone.{did_you_mean(key, asked_by_any)}" for key in unused]
    return found


def write_local(path: Path, state: dict[str, Any]) -> None:
    """Write one rank's small state: tensors and plain JSON values by name, as safetensors."""
    tensors = {key: value.detach().cpu().contiguous() for key, value in state.items() if torch.is_tensor(value)}
    values = {key: value for key, value in state.items() if not torch.is_tensor(value)}
    # Python's JSON keeps every float to the bit, NaN and infinities included; only read_local reads this.
    write_synced(path, safetensors_bytes(tensors, metadata={"values": json.dumps(values)}))


def read_local(path: Path) -> dict[str, Any]:
    """Return what `write_local` wrote (tuples come back as lists, keys of dicts as text).

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as stream:
            state = json.loads(stream.metadata()["values"])
            state.update({key: stream.get_tensor(key) for key in stream.keys()})  # noqa: SIM118 (no iteration)
            return state
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{path} is damaged: {exc}") from exc


def _from_dcp(what: str, exc: CheckpointException) -> CheckpointError:
    rank, (cause, _) = min(exc.failures.items(), key=lambda item: item[0])
    if isinstance(cause, OSError):
        return disk_error(f"{what}: rank {rank}", cause)
    return CheckpointError(f"{what}: rank {rank}: {type(cause).__name__}: {cause}")


def _quiet() -> None:
    # One process without torch.distributed is a normal run here, not worth a warning at each save.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
