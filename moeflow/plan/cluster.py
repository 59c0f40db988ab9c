"""Description of a cluster: how many ranks, how they are joined, what they are.

nodes: 12000
ranks_per_node: 8
device: h100
memory_gib: 80          # of one rank; the device's where left out
reserve: 0.08           # share of it that is kept free (fragments, the driver, libraries)
profile: profile.json   # measured coefficients, or their keys right here
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeflow.errors import ConfigError, did_you_mean
from moeflow.plan.profile import Profile, default_profile, load_profile, profile_from, read_mapping

_KEYS = ("nodes", "ranks_per_node", "device", "memory_gib", "reserve", "profile")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal ranks.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: processes, one a device, on each.
        profile: coefficients.
        reserve: share of a rank's memory that stays free.
    """

    nodes: int
    ranks_per_node: int
    profile: Profile
    reserve: float = 0.08

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def usable_bytes(self) -> int:
        """Bytes of one rank that a plan may use."""
        return int(self.profile.memory_bytes * (1.0 - self.reserve))

    def near(self, size: int, stride: int) -> int:
        """Ranks of a group with this size and stride that stand on one node (at least the rank itself)."""
        return max(1, min(size, self.ranks_per_node // stride))


def cluster_for(device: str, ranks: int, ranks_per_node: int | None = None) -> Cluster:
    """A cluster of default coefficients.

    Args:
        device: key of `profile.DEFAULTS`.
        ranks: in all.
        ranks_per_node: None takes 8, or all where there are fewer.

    Raises:
        ConfigError: the ranks do not fill nodes, or the device is not known.
    """
    per_node = ranks_per_node or min(8, ranks)
    if ranks % per_node:
        raise ConfigError(
            f"{ranks} ranks do not fill nodes of {per_node}", f"--ranks {-(-ranks // per_node) * per_node}"
        )
    return Cluster(ranks // per_node, per_node, default_profile(device))


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster description (YAML or JSON).

    Raises:
        ConfigError: the file is missing or wrong.
    """
    return cluster_from(read_mapping(path, "cluster"), Path(path))


def cluster_from(values: Mapping[str, Any], path: Path) -> Cluster:
    """Build a cluster from the keys of a file.

    Args:
        values: the file's content.
        path: of the file; a profile named in it is relative to it.

    Raises:
        ConfigError: an unknown key or a wrong value.
    """
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"{path}: unknown key '{key}'.{did_you_mean(key, _KEYS)}", f"one of {', '.join(_KEYS)}")
    profile = _profile(values, path)
    if "memory_gib" in values:
        memory = profile_from({"device": profile.device, "memory_bytes": values["memory_gib"]}, str(path)).memory_bytes
        profile = replace(profile, memory_bytes=memory * 2**30)
    counts = {}
    for key in ("nodes", "ranks_per_node"):
        value = values.get(key, 1 if key == "nodes" else 8)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{path}: {key} is {value!r}: must be a whole number above 0", f"{key}: 8")
        counts[key] = value
    reserve = values.get("reserve", 0.08)
    if isinstance(reserve, bool) or not isinstance(reserve, (int, float)) or not 0 <= reserve < 1:
        raise ConfigError(f"{path}: reserve is {reserve!r}: must be a number from 0 to below 1", "reserve: 0.08")
    return Cluster(counts["nodes"], counts["ranks_per_node"], profile, float(reserve))


def _profile(values: Mapping[str, Any], path: Path) -> Profile:
    given = values.get("profile", {})
    if isinstance(given, str):
        return load_profile(path.parent / given)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{path}: profile is {given!r}: must be a file name or a mapping", "profile: profile.json")
    device = {"device": values["device"]} if "device" in values else {}
    return profile_from({**device, **given}, f"{path}: profile")
