"""Checkpoints as whole tensors in one process: to look at them, to convert them, to begin a run from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moeflow.errors import CheckpointError
from moeflow.train import shards
from moeflow.train.checkpoint import CheckpointStore

#: In the meta of a checkpoint without optimizer state: training starts with a new one.
WEIGHTS_ONLY = "weights_only"
#: In the meta of a checkpoint that was made from another one or imported.
ORIGIN = "origin"


def pick(store: CheckpointStore, step: int | None) -> int:
    """Return `step`, or the latest where it is None.

    Raises:
        CheckpointError: there is none.
    """
    found = store.latest() if step is None else step
    if found is None or found not in store.steps():
        known = ", ".join(map(str, store.steps())) or "none"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"{store.folder}: {what}; there: {known}", "moeflow ckpt ls RUN_DIR shows them")
    return found


def read(store: CheckpointStore, step: int, prefix: str = "") -> dict[str, Tensor]:
    """Read tensors whose key begins with `prefix`, whole, after all files were compared with the manifest.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    store.verify(step)
    folder = store.folder / f"step_{step:08d}"
    index = shards.read_index(folder).state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in index.items()
        if isinstance(entry, TensorStorageMetadata) and key.startswith(prefix)
    }
    store.load(step, tensors, verify=False, strict=False)
    return tensors


def begin(folder: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    """Write the first checkpoint of a run; `meta` is added to what every checkpoint says.

    Without the optimizer's state among the tensors, training starts with a new one.  Random generators start anew.

    Raises:
        CheckpointError: it cannot be written.
    """
    weights_only = not any(key.startswith("optimizer/") for key in tensors)
    store = CheckpointStore(folder)
    try:
        # No layout is equal to this one: there are no random generators to put back.
        store.save(step, tensors, {}, {"metrics": {}, "layout": {}, WEIGHTS_ONLY: weights_only, **meta})
    finally:
        store.close()
