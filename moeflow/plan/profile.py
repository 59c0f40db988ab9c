"""Coefficients of the cost model: what one rank computes and moves in a second, by device, as defaults or as measured.

A profile is a JSON or YAML file:

    device: h100
    source: measured
    flops: {bf16: 5.2e14, fp32: 3.0e14}
    memory_bytes_per_s: 2.9e12
    inside: {latency_s: 8.0e-6, bytes_per_s: 3.6e11}
    between: {latency_s: 1.5e-5, bytes_per_s: 4.5e10}

Keys that are left out keep the default of the device.  All rates are those that a program reaches, not those on the
data sheet.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeflow.errors import ConfigError, did_you_mean

#: Bytes of one number, by the names of `precision.dtype`.
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """What joins two ranks.

    Attributes:
        latency_s: seconds of an empty message.
        bytes_per_s: of one rank, one way, while its peers send too.
    """

    latency_s: float
    bytes_per_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """Coefficients of one kind of machine.

    Attributes:
        device: key of DEFAULTS that filled what was not given.
        source: "default" or "measured".
        flops: FLOP/s of large matrix products, by dtype.
        half_rows: rows at which one expert's matrix product reaches half of that rate (small ones waste the device).
        launch_s: seconds to start one matrix product, however small.
        memory_bytes_per_s: of the rank's own memory.
        memory_bytes: memory of one rank.
        inside: link between ranks of one node.
        between: link between ranks of different nodes.
        shared_nic: whether the ranks of a node share one link to other nodes; `between.bytes_per_s` is then the node's.
        tree_growth: how the time of a broadcast or reduce grows with the group: 0 where the data flow through a chain
            or tree in pieces (NCCL), 1 where each level of a binomial tree waits for the whole message (gloo).
        chunk_s: seconds that one more chunk costs (split, events, a collective's call) beside its latency.
        overlap: share of communication that runs while the device computes; the rest delays computation.
        row_passes: passes over a row's bytes in memory that dispatch and combine make, forward and backward together.
    """

    device: str
    source: str
    flops: Mapping[str, float]
    half_rows: float
    launch_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    inside: Link
    between: Link
    shared_nic: bool = False
    tree_growth: float = 0.0
    chunk_s: float = 1.0e-5
    overlap: float = 0.9
    row_passes: float = 6.0

    def rate(self, dtype: str) -> float:
        """FLOP/s of large matrix products.

        Raises:
            ConfigError: the profile has no rate for the dtype.
        """
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise ConfigError(
                f"the profile of device {self.device} has no FLOP/s for {dtype}; it has {known}", f"flops.{dtype} in it"
            )
        return self.flops[dtype]


# Rates that large training jobs report to reach (about half to two thirds of the data sheet's peak for matrix products;
# 80 % of the link's for collectives), not measurements of ours.  Sources: docs/balance.md.
DEFAULTS: dict[str, Profile] = {
    profile.device: profile
    for profile in (
        Profile(
            "cpu", "default", {"fp32": 7.0e10, "bf16": 7.0e10, "fp16": 7.0e10}, 8, 5e-6, 1.0e10, 16 * 2**30,
            Link(5e-5, 2.0e9), Link(1e-4, 1.2e8), shared_nic=True, tree_growth=1.0, chunk_s=1e-4, overlap=0.5,
        ),
        Profile(
            "v100", "default", {"fp32": 1.2e13, "bf16": 1.2e13, "fp16": 7.0e13}, 96, 6e-6, 7.0e11, 32 * 2**30,
            Link(1e-5, 1.2e11), Link(2e-5, 1.0e10),
        ),
        Profile(
            "a100", "default", {"fp32": 9.0e13, "bf16": 1.8e14, "fp16": 1.8e14}, 128, 5e-6, 1.6e12, 80 * 2**30,
            Link(9e-6, 2.3e11), Link(1.8e-5, 2.0e10),
        ),
        Profile(
            "h100", "default", {"fp32": 2.5e14, "bf16": 5.0e14, "fp16": 5.0e14}, 192, 5e-6, 2.7e12, 80 * 2**30,
            Link(8e-6, 3.5e11), Link(1.5e-5, 4.2e10),
        ),
        Profile(
            "h200", "default", {"fp32": 2.5e14, "bf16": 5.5e14, "fp16": 5.5e14}, 192, 5e-6, 4.1e12, 139 * 2**30,
            Link(8e-6, 3.5e11), Link(1.5e-5, 4.2e10),
        ),
        Profile(
            "b200", "default", {"fp32": 5.0e14, "bf16": 1.1e15, "fp16": 1.1e15}, 256, 5e-6, 6.5e12, 180 * 2**30,
            Link(8e-6, 7.0e11), Link(1.5e-5, 4.2e10),
        ),
    )
}  # fmt: skip


def default_profile(device: str) -> Profile:
    """The default coefficients of a device.

    Raises:
        ConfigError: the device is not known.
    """
    if device not in DEFAULTS:
        raise ConfigError(
            f"no default profile for device '{device}'; known: {', '.join(DEFAULTS)}.{did_you_mean(device, DEFAULTS)}",
            "measure one, or name the nearest of these as its device",
        )
    return DEFAULTS[device]


def profile_from(values: Mapping[str, Any], origin: str = "profile") -> Profile:
    """Build a profile from the keys of a file over the defaults of its device.

    Args:
        values: the file's content.
        origin: what messages call it.

    Raises:
        ConfigError: an unknown key, or a value that is not a positive number.
    """
    base = default_profile(str(values.get("device", "cpu")))
    known = {field.name for field in dataclasses.fields(Profile)}
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{origin}: unknown key '{key}'.{did_you_mean(key, known)}", f"one of {sorted(known)}")
        if key in ("inside", "between"):
            changes[key] = _link(value, getattr(base, key), f"{origin}: {key}")
        elif key == "flops":
            rates = _mapping(value, f"{origin}: flops")
            changes[key] = {**base.flops, **{k: _positive(v, f"{origin}: flops.{k}") for k, v in rates.items()}}
        elif key in ("device", "source"):
            changes[key] = str(value)
        elif key == "shared_nic":
            changes[key] = bool(value)
        else:
            changes[key] = _positive(value, f"{origin}: {key}", zero=key not in ("memory_bytes_per_s", "memory_bytes"))
    return dataclasses.replace(base, **changes)


def load_profile(path: str | Path) -> Profile:
    """Read a profile; `.json` as JSON, anything else as YAML.

    Raises:
        ConfigError: the file is missing, unreadable, or wrong.
    """
    return profile_from(read_mapping(path, "profile"), str(path))


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile as JSON, which is YAML too."""
    Path(path).write_text(json.dumps(dataclasses.asdict(profile), indent=2) + "\n", encoding="utf-8")


def read_mapping(path: str | Path, what: str) -> dict[str, Any]:
    """Read a JSON or YAML file that holds one mapping.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds something else.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the {what} file {path} cannot be read: {error.strerror}", "name a file that exists"
        ) from None
    try:
        # YAML 1.1 reads 1e9 as text; JSON does not, and is tried first for that reason.
        values = json.loads(text)
    except json.JSONDecodeError:
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"the {what} file {path} is neither JSON nor YAML: {error}", "mend its syntax") from None
    return dict(_mapping(values, f"the {what} file {path}"))


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r}: must be a mapping of names to values", "key: value lines")
    return value


def _link(value: Any, base: Link, name: str) -> Link:
    values = _mapping(value, name)
    known = ("latency_s", "bytes_per_s")
    for key in values:
        if key not in known:
            raise ConfigError(f"{name}: unknown key '{key}'.{did_you_mean(key, known)}", f"one of {known}")
    checked = {key: _positive(v, f"{name}.{key}", zero=key == "latency_s") for key, v in values.items()}
    return dataclasses.replace(base, **checked)


def _positive(value: Any, name: str, zero: bool = False) -> float:
    try:
        number = float(value)  # also "1e9", which YAML hands over as text
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or number < 0 or (number == 0 and not zero) or number != number:
        raise ConfigError(f"{name} is {value!r}: must be a number {'not below' if zero else 'above'} 0", f"{name}: 1e9")
    return number
