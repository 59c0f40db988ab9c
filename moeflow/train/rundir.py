"""The folder of a run: made once, never shared, never overwritten.

    RUN_DIR/config.yaml       the frozen configuration; config.N.yaml are the ones before a resume changed it
    RUN_DIR/overrides.yaml    the words of the command line
    RUN_DIR/command.txt       the shell commands that started and resumed the run
    RUN_DIR/recipe_diff.yaml  what differs from the recipe alone
    RUN_DIR/env.json          versions, machine, git commit
    RUN_DIR/status.json       created, running, finished, failed or interrupted; process, host, times
    RUN_DIR/run.lock          held by the process that trains here
    RUN_DIR/metrics.jsonl, metrics.csv, experts.jsonl, summary.json, checkpoints/, traces/

No torch and no Hydra here: `moeflow ls` and completion read run folders too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import itertools
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moeflow.errors import ConfigError, LaunchError
from moeflow.logging import get_logger
from moeflow.schema import RunConfig
from moeflow.train.files import json_bytes, write_atomic
from moeflow.train.shelf import Shelf, resume_command

logger = get_logger(__name__)

CONFIG = "config.yaml"
STATUS = "status.json"
LOCK = "run.lock"
STATES = ("created", "running", "finished", "failed", "interrupted")
#: Folder name of runs that were made without a recipe.
NO_RECIPE = "custom"

# Lock files held by this process -> descriptor.  A record lock is lost when the process closes any descriptor of the
# file, so a second look at it must not open it.
_held: dict[Path, int] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class RunDir:
    """One run folder, by its absolute path."""

    path: Path

    @property
    def config(self) -> Path:
        """The frozen configuration."""
        return self.path / CONFIG

    @property
    def overrides(self) -> Path:
        """The words of the command line, a YAML list."""
        return self.path / "overrides.yaml"

    @property
    def command(self) -> Path:
        """The shell commands that started and resumed the run."""
        return self.path / "command.txt"

    @property
    def metrics_jsonl(self) -> Path:
        """One JSON object for each logged step."""
        return self.path / "metrics.jsonl"

    @property
    def metrics_csv(self) -> Path:
        """The same rows for spreadsheets."""
        return self.path / "metrics.csv"

    @property
    def experts_jsonl(self) -> Path:
        """What each expert of each layer got; absent without MoE layers."""
        return self.path / "experts.jsonl"

    @property
    def summary(self) -> Path:
        """The final figures."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def traces(self) -> Path:
        """Folder of profiler traces."""
        return self.path / "traces"

    def latest_step(self) -> int | None:
        """Return the step of the checkpoint to go on from, or None when nothing was saved."""
        return Shelf(self.checkpoints).latest()

    # --- status ------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return what status.json states; `state` is "killed" where a run ended without saying so."""
        status = self._read_status() or {"state": "unknown"}
        if status.get("state") == "running" and not self.in_use():
            status["state"] = "killed"
        return status

    def mark(self, state: str, **facts: Any) -> None:
        """Write the state of the run, with the time.

        Args:
            state: one of `STATES`.
            facts: more entries, for example `exit_code`.
        """
        assert state in STATES, state
        if state == "running":
            facts = {"begun": None, "forced": False, **facts}
        self._note(state=state, pid=os.getpid(), host=socket.gethostname(), **{state: _now()}, **facts)

    def begin(self) -> None:
        """Note that the first step is about to be trained: config.yaml as it stands is not taken back any more."""
        self._note(begun=_now(), config_before=None)

    def _note(self, **facts: Any) -> None:
        write_atomic(self.path / STATUS, json_bytes(self._read_status() | facts))

    def _read_status(self) -> dict[str, Any]:
        try:
            status = json.loads((self.path / STATUS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    # --- lock --------------------------------------------------------------------------------------------------------

    def acquire(self, patience_s: float = 1.0) -> None:
        """Hold the folder until `release` or the end of the process, however it ends.

        Args:
            patience_s: how long to wait for a process that only looks whether the folder is in use.

        Raises:
            LaunchError: another process trains in this folder.
        """
        path = self.path / LOCK
        if path in _held:
            raise LaunchError(f"{self.path} is in use by this very process.", "train in another folder")
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + patience_s
        while not _try_lock(handle, path):
            if time.monotonic() > deadline:
                holder = path.read_text(encoding="utf-8").strip() or "another process"
                os.close(handle)
                raise LaunchError(
                    f"{self.path} is in use by {holder}; two processes never train in one folder.",
                    "wait for it or stop it (SIGTERM saves a checkpoint), or start a run of its own with moeflow train",
                )
            time.sleep(0.05)
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {_now()}\n".encode())
        _held[path] = handle

    def release(self) -> None:
        """Give the folder free."""
        path = self.path / LOCK
        os.close(_held.pop(path))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for the time of a `with` block; see `acquire`."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def in_use(self) -> bool:
        """Whether a process trains in this folder now."""
        path = self.path / LOCK
        if path in _held:
            return True
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not _try_lock(handle, path)
        finally:
            os.close(handle)

    # --- contents ----------------------------------------------------------------------------------------------------

    def replace_config(self, text: str) -> Path:
        """Write a new config.yaml, the old one kept as config.N.yaml with the next free number; return that path."""
        for number in itertools.count(1):
            kept = self.path / f"config.{number}.yaml"
            try:
                _keep(self.config, kept)
                break
            except FileExistsError:
                continue
        write_atomic(self.config, text.encode())
        self._note(config_before=kept.name)
        return kept

    def keep_config(self) -> None:
        """Keep the last change of config.yaml, whatever comes after."""
        if self._read_status().get("config_before"):
            self._note(config_before=None)

    def take_back_config(self) -> bool:
        """Put back the config.yaml from before the last change, unless training has begun with the new one.

        Otherwise a change that cannot be run (a device that is not there) would be in the way of every later resume.
        """
        name = self._read_status().get("config_before")
        if not name or not (self.path / name).is_file():
            return False
        os.replace(self.path / name, self.config)
        self._note(config_before=None)
        return True


def create(config: RunConfig, dump: Callable[[RunConfig], str], files: Mapping[str, str] | None = None) -> RunDir:
    """Make the folder of a new run; its config.yaml states the folder's own path.

    Args:
        config: configuration with absolute paths; `run.dir` names the folder, else it is ROOT/RECIPE/TIME-ID.
        dump: the configuration as YAML text.
        files: further files, {name: text}.

    Raises:
        ConfigError: the folder holds something already, or cannot be made; nothing was changed then.
    """
    path = _claim(Path(config.run.dir)) if config.run.dir is not None else _new_folder(config)
    run = RunDir(path)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(path)))
    try:
        for name, text in (files or {}).items():
            write_atomic(path / name, text.encode())
        write_atomic(run.config, dump(config).encode())
        run.mark("created")
    except OSError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise _unwritable(path, error) from error
    except UnicodeEncodeError as error:
        shutil.rmtree(path, ignore_errors=True)
        raise ConfigError(
            f"the path {str(path)!a}, or that of the current folder, is not UTF-8 text.", "rename the folder"
        ) from error
    return run


def open(path: str | os.PathLike[str]) -> RunDir:
    """Return the run folder at `path`.

    Raises:
        ConfigError: it is no run folder; the message says what it is.
    """
    folder = Path(os.path.abspath(path))
    if folder.name == CONFIG and folder.is_file():
        folder = folder.parent
    if not folder.exists():
        near = sorted(str(run.path) for run in list_runs(folder.parent)) if folder.parent.is_dir() else []
        mend = f"one of its neighbours: {near[-1]}" if near else "moeflow ls shows run folders"
        raise ConfigError(f"there is no run folder {folder}.", mend)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a run folder.", "give the folder that holds config.yaml")
    if not (folder / CONFIG).is_file():
        outer = next((parent for parent in folder.parents if (parent / CONFIG).is_file()), None)
        inner = list_runs(folder)
        mend = (
            f"give the run folder itself: {inner[0].path if inner else outer}"
            if outer or inner
            else "give a folder that moeflow train made"
        )
        raise ConfigError(f"{folder} is no run folder: it has no {CONFIG}.", mend)
    return RunDir(folder)


def list_runs(folder: str | os.PathLike[str]) -> list[RunDir]:
    """Return the runs directly inside `folder`, the newest first."""
    try:
        entries = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []
    # The names begin with the time of making.
    return [
        RunDir(path) for path in sorted(entries, key=lambda path: path.name, reverse=True) if (path / CONFIG).is_file()
    ]


def _new_folder(config: RunConfig) -> Path:
    parent = Path(config.run.root) / (config.run.recipe or NO_RECIPE)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            now = time.time()
            stamp = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(now))
            # Names order runs by time, within a second too: five digits of it, and one that is drawn.
            path = parent / f"{stamp}-{int(now % 1 * 16**5):05x}{secrets.randbelow(16):x}"
            try:
                path.mkdir()
                return path
            except FileExistsError:
                continue
    except OSError as error:
        raise _unwritable(parent, error) from error


def _claim(path: Path) -> Path:
    """Make the folder that the user named, or take an empty one, so that only one process can succeed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise _taken(path)
        (path / STATUS).touch(exist_ok=False)
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise _unwritable(path, error) from error
    (path / STATUS).write_text("{}")
    return path


def _keep(file: Path, copy: Path) -> None:
    """Give a file a second name that must be new, or an exclusive copy where the file system has no hard links."""
    try:
        os.link(file, copy)
    except FileExistsError:
        raise
    except OSError:
        with copy.open("xb") as stream:
            stream.write(file.read_bytes())


def _taken(path: Path) -> ConfigError:
    if not path.is_dir():
        return ConfigError(f"run.dir={path} is a file.", "run.dir=NEW_FOLDER, or leave it out")
    if (path / CONFIG).is_file() or (path / STATUS).is_file():
        return ConfigError(f"run.dir={path} holds a run already.", f"{resume_command(path)}, or another run.dir")
    return ConfigError(f"run.dir={path} is not empty.", "run.dir=NEW_FOLDER, or leave it out")


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the run folder {path} cannot be made: {error.strerror}.",
        "run.root=FOLDER on a disk with room and write access",
    )


def _try_lock(handle: int, path: Path) -> bool:
    """Take the record lock; False when another process has it.

    A record lock, unlike flock, works over NFS, and forked data workers do not inherit it.
    """
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        logger.warning("%s: no locks on this file system; do not start two runs in one folder", path.parent)
    return True


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
