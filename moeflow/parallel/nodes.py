"""Which ranks share a node, and what the topology-aware gate is told of it."""

from __future__ import annotations

import os
import socket

import torch

from moeflow.errors import ConfigError
from moeflow.moe import MoELayer
from moeflow.moe.gates import TopologyGate
from moeflow.parallel.collectives import broadcast_object, gather_objects
from moeflow.parallel.topology import Group
from moeflow.plan.cost import Grouping
from moeflow.plan.outgoing import outgoing_share
from moeflow.plan.profile import DEFAULTS, Profile, default_profile, load_profile


def own_node() -> str:
    """A name of this rank's node: its number by torchrun or SLURM, or the host's name."""
    for variable in ("GROUP_RANK", "SLURM_NODEID"):
        if variable in os.environ:
            return f"{variable} {os.environ[variable]}"
    return socket.gethostname()


def place_topology_gate(layer: MoELayer, ep: Group, device: torch.device) -> None:
    """Tell a topology-aware gate where the experts are and, unless it was configured, what share may leave the node.

    Every rank of the group must call it.
    """
    gate = layer.gate
    if not isinstance(gate, TopologyGate) or ep.size == 1:
        return
    names = gather_objects(own_node(), ep)
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    node_of_rank = [number[name] for name in names]
    per_rank = layer.num_experts // ep.size
    gate.place([node_of_rank[expert // per_rank] for expert in range(layer.num_experts)], node_of_rank[ep.rank])
    if gate.share is None:
        # Of the fullest node, so that all ranks have the same limit.
        ranks_per_node = max(node_of_rank.count(node) for node in number.values())
        gate.share = outgoing_share(default_of(device), ranks_per_node, len(number))


def own_profile(path: str | None, device: torch.device, world: Group) -> Profile:
    """Coefficients of the cost model, the same on every rank; collective.

    Args:
        path: of a file that `moeflow calibrate` wrote; None takes the device's defaults.
        device: of this rank.
        world: all ranks; the first one reads the file.

    Raises:
        ConfigError: the file cannot be read, on every rank.
    """
    found: Profile | ConfigError | None = None
    if world.rank == 0:
        try:
            found = default_of(device) if path is None else load_profile(path)
        except ConfigError as error:
            found = error
    found = broadcast_object(found, world)
    if isinstance(found, ConfigError):
        raise found
    assert found is not None
    return found


def grouping_of(names: list[str]) -> Grouping:
    """Where the ranks of a group stand, from the node of each: as the cost model sees it.

    Ranks that do not fill whole nodes in order are taken as one on each node, which is the slower guess.
    """
    places = names.count(names[0])
    even = names == [names[index // places * places] for index in range(len(names))]
    return Grouping(len(names), places if even and len(set(names)) * places == len(names) else 1)


def default_of(device: torch.device) -> Profile:
    """The default coefficients of a device: by its name, where that is known."""
    if device.type != "cuda":
        return default_profile("cpu")
    name = torch.cuda.get_device_name(device).lower()
    return default_profile(next((known for known in DEFAULTS if known in name), "a100"))
