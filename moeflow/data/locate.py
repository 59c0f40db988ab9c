"""Where CIFAR-10 lies, or why it does not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moeflow.data import archive, cifar10, download
from moeflow.errors import ConfigError, DataError
from moeflow.schema.data import DataConfig

ROOT_VARIABLE = "MOEFLOW_DATA"


@dataclass(frozen=True)
class Found:
    """Answer of `locate`.

    Attributes:
        folder: holds the data files; None when there are none and the run may go on without.
        reason: where was looked and why nothing was had, for people; None when a folder was found.
    """

    folder: Path | None
    reason: str | None = None


def usual_places() -> list[Path]:
    """Folders looked in when data.root is null: $MOEFLOW_DATA, ./data, ~/.cache/moeflow/data."""
    named = os.environ.get(ROOT_VARIABLE)
    places = [Path(named).expanduser()] if named else []
    return [*places, Path.cwd() / "data", cache_folder()]


def cache_folder() -> Path:
    """Where downloads go unless $MOEFLOW_DATA or data.root says otherwise."""
    return Path("~/.cache/moeflow/data").expanduser()


def locate(cfg: DataConfig) -> Found:
    """Find the data files in the folder the user named or the usual ones, else unpack or download the archive.

    Args:
        cfg: `root`, `download`, `source` and `on_missing` are read; `source` is not "synthetic".

    Raises:
        DataError: a folder that was named (data.root) has no data, a file or an archive is damaged, or nothing was
            found and the configuration forbids going on without.
        ConfigError: data.root is a file.
    """
    places = [_named(cfg.root)] if cfg.root is not None else usual_places()
    for place in places:
        folder = _look(place)
        if folder is not None:
            return Found(folder)
    looked = "looked in " + ", ".join(str(place) for place in places)
    try:
        if not cfg.download:
            raise download.DownloadError("data.download=false")
        named = cfg.root is not None or bool(os.environ.get(ROOT_VARIABLE))
        return Found(download.fetch(places[0] if named else cache_folder()))
    except download.DownloadError as error:
        reason = f"{looked}; no download: {error.what}"
        if cfg.root is not None:
            raise DataError(f"data.root={cfg.root} holds no CIFAR-10 ({reason})", _mend()) from error
        if cfg.source == "real" or cfg.on_missing == "error":
            key = "data.source=real" if cfg.source == "real" else "data.on_missing=error"
            raise DataError(
                f"CIFAR-10 was not found, and {key} forbids going on without ({reason})", _mend()
            ) from error
        return Found(None, reason)


def _named(root: str) -> Path:
    """The folder of data.root, which must be there."""
    place = Path(root).expanduser()
    if os.path.isfile(place):
        raise ConfigError(f"data.root={root} is a file, a folder was expected", f"pass data.root={place.parent}")
    if not os.path.isdir(place):
        raise DataError(
            f"data.root={root} does not exist",
            f"make the folder (then the data are downloaded into it), or leave data.root out to look in the usual "
            f"places: ${ROOT_VARIABLE}, ./data, ~/.cache/moeflow/data",
        )
    return place


def _look(place: Path) -> Path | None:
    """Return the folder with the data files at `place`: itself, below it, or unpacked from an archive lying there."""
    for folder in (place, *(place / layout.folder for layout in cifar10.LAYOUTS)):
        if cifar10.layout_of(folder) is not None:
            return folder
    for known in archive.ARCHIVES:
        path = place / known.name
        if os.path.isfile(path):
            try:
                with download.lock_of(place):
                    return archive.unpack(path, known)
            except OSError as error:
                raise DataError(
                    f"{path} cannot be unpacked beside itself: {place} is not writable ({error.strerror or error})",
                    f"unpack it elsewhere: tar -xzf {path} -C FOLDER, and pass data.root=FOLDER",
                ) from error
    return None


def _mend() -> str:
    return f"{how_to_get()}, or train on the drawn stand-in: data.source=synthetic"


def how_to_get() -> str:
    """One sentence on how to come by the real data."""
    return (
        f"fetch {download.URL}, unpack it (tar -xzf) into FOLDER, "
        f"and pass data.root=FOLDER or set {ROOT_VARIABLE}=FOLDER"
    )
