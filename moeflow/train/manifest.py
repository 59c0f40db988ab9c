"""The list of files of one checkpoint, with their sizes and checksums.

    {"format": 1, "step": 100, "world": 2, "files": {NAME: {"bytes": 42, "blake2b": HEX}, ...}, "checksum": HEX}

`checksum` covers the manifest itself, so that a flipped bit in it is told from a flipped bit in a shard.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from moeflow.errors import CheckpointError
from moeflow.train.files import json_bytes, write_synced

FORMAT = 1
NAME = "manifest.json"
BLOCK = 1 << 20


def digest(path: Path) -> str:
    """Return the BLAKE2b checksum (128 bits, hex) of a file's content."""
    state = hashlib.blake2b(digest_size=16)
    block = bytearray(BLOCK)
    view = memoryview(block)
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            state.update(view[:count])
    return state.hexdigest()


def entries(folder: Path, paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Return the manifest's `files` for `paths`, by their names relative to `folder`."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "blake2b": digest(path)}
        for path in sorted(paths)
    }


def write(folder: Path, step: int, world: int, files: dict[str, dict[str, Any]]) -> None:
    """Write `folder`/manifest.json and wait until it is on disk."""
    content = {"format": FORMAT, "step": step, "world": world, "files": dict(sorted(files.items()))}
    write_synced(folder / NAME, json_bytes({**content, "checksum": _checksum(content)}))


def read(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint folder.

    Raises:
        CheckpointError: it is missing, damaged, or written by a later format.
    """
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(f"checkpoint {folder} is damaged: {NAME} is missing")
    try:
        content = json.loads(path.read_bytes())
        checksum = content.pop("checksum")
        version = int(content["format"])
        well_formed = version > FORMAT or _well_formed(content)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder}: {NAME} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, OverflowError):
        raise CheckpointError(f"checkpoint {folder}: {NAME} is damaged: it is not the JSON that was written") from None
    if checksum != _checksum(content):
        raise CheckpointError(f"checkpoint {folder}: {NAME} is damaged: checksum differs")
    if version > FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {version}; this moeflow reads up to {FORMAT}", "upgrade moeflow"
        )
    if not well_formed:
        raise CheckpointError(f"checkpoint {folder}: {NAME} is damaged: it is not the JSON that was written")
    return content


def _well_formed(content: dict[str, Any]) -> bool:
    """Whether everything is of the kind that `write` wrote; names lead nowhere outside the folder."""
    files = content["files"]
    numbers = [content["step"], content["world"], *(entry["bytes"] for entry in files.values())]
    return (
        all(type(number) is int and number >= 0 for number in numbers)
        and content["world"] >= 1
        and all(isinstance(entry["blake2b"], str) for entry in files.values())
        and not any(name.startswith("/") or ".." in name.split("/") or "\0" in name for name in files)
    )


def faults(folder: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """Return one sentence for each of `files` that is missing, of another size or of another content."""
    found = []
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif (size := path.stat().st_size) != entry["bytes"]:
            word = "truncated" if size < entry["bytes"] else "too long"
            found.append(f"{name} is {word}: {size} bytes instead of {entry['bytes']}")
        elif digest(path) != entry["blake2b"]:
            found.append(f"{name} is damaged: its content does not match its checksum")
    return found


def share(files: dict[str, dict[str, Any]], part: int, parts: int) -> dict[str, dict[str, Any]]:
    """Return the files that rank `part` of `parts` checks: nearly equal bytes each, all files once."""
    load = [0] * parts
    mine = {}
    for name, entry in sorted(files.items(), key=lambda item: (-int(item[1]["bytes"]), item[0])):
        taker = load.index(min(load))
        load[taker] += int(entry["bytes"])
        if taker == part:
            mine[name] = entry
    return mine


def _checksum(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
