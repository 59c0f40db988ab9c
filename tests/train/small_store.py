"""Small checkpoints whose values say which step they are of."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moeflow.train.checkpoint import CheckpointStore


def store_of_rank(folder: str) -> CheckpointStore:
    return CheckpointStore(folder, rank=dist.get_rank(), world=dist.get_world_size())


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def small(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((5, 3), value), "b": torch.full((7,), value, dtype=torch.float64)}


def save_small(store: CheckpointStore, step: int, **metrics: float) -> None:
    store.save(step, small(float(step)), {"seen": step}, {"metrics": metrics})


def value_of(store: CheckpointStore, step: int) -> float:
    tensors = small(-1.0)
    store.load(step, tensors)
    values = {x for tensor in tensors.values() for x in tensor.flatten().tolist()}
    assert len(values) == 1, "half of one checkpoint, half of another"
    return values.pop()


def lay_out(full: torch.Tensor, mesh: DeviceMesh, placements: list) -> DTensor:
    """This rank's part of `full` as a DTensor, cut by hand: chunks of ceil(size / ranks), the last short or empty."""
    part, coordinate = full, mesh.get_coordinate()
    for place, ranks, index in zip(placements, mesh.shape, coordinate, strict=True):
        if isinstance(place, Shard):
            size = full.shape[place.dim]
            chunk = -(-size // ranks)
            start = min(index * chunk, size)
            part = part.narrow(place.dim, start, min(chunk, size - start))
    local = part.clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
