"""What every test shares: one thread, no network, no launcher's variables, and the shared data where they are."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.distributed import LAUNCHER_VARIABLES, ROOT

# Before the first import of torch: its thread pools are made from these, and the ranks of a test share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["WANDB_MODE"] = "offline"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for _name in [*LAUNCHER_VARIABLES, *(name for name in os.environ if name.startswith("MOEFLOW_"))]:
    if _name not in ("MOEFLOW_TEST_DATA", "MOEFLOW_CUDA_HOST_CACHE"):
        os.environ.pop(_name, None)

import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def _fresh_logging() -> Iterator[None]:
    """A test that set up logging leaves a handler on its captured stderr, which is closed when the next one logs."""
    yield
    logger = logging.getLogger("moeflow")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """What a test draws without a seed of its own does not depend on the tests before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with the real data that tests use and the repository does not carry; skips where it is absent."""
    folder = Path(os.environ.get("MOEFLOW_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; point MOEFLOW_TEST_DATA at them")
    return folder


@pytest.fixture(scope="session")
def real_cifar10(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that holds `cifar-10-batches-py` with the real images, unpacked once for the session."""
    script = shared_data / "make_cifar10.py"
    if not script.is_file():
        pytest.skip(f"no {script.name} in {shared_data}")
    out = tmp_path_factory.mktemp("cifar10")
    subprocess.run([sys.executable, str(script), str(out)], check=True, capture_output=True, timeout=300)
    return out


@pytest.fixture
def cli(tmp_path: Path):
    """Function that runs `moeflow *args` as a user would, from a folder of its own; returns the finished process."""

    def run(*args: str, timeout: float = 60.0, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moeflow", *args],
            cwd=cwd or tmp_path,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    return run
