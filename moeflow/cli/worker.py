"""What each rank runs when moeflow starts the ranks itself.

python -m moeflow.cli.worker RUN_DIR [--resume]                            train
python -m moeflow.cli.worker RUN_DIR --eval CONFIG [--step=N] [--json]     evaluate with a changed configuration
python -m moeflow.cli.worker FOLDER --calibrate FILE                       measure the cost model's coefficients
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

from moeflow import logging
from moeflow.cli.interrupts import ending_at_once
from moeflow.errors import MoeflowError, stopped_code


def main(argv: list[str]) -> int:
    """Train or evaluate as one rank of the run in argv[0]; returns the exit code."""
    # Without a word: the process that started the ranks was told too, and speaks for all.
    with ending_at_once(lambda number: None):
        _told_when_orphaned()
        return _work(argv)


def _told_when_orphaned() -> None:
    """Have the system send SIGTERM, which saves and stops, when the process that started this rank is killed.

    Otherwise it would train on without anybody knowing, in a folder that a resume then takes.
    """
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGTERM), 0, 0, 0)


def _work(argv: list[str]) -> int:
    from moeflow.config import load

    run_dir, resume = argv[0], "--resume" in argv[1:]
    logging.setup()
    try:
        if argv[1:2] == ["--eval"]:
            from moeflow.cli.eval import evaluate_as_rank

            steps = [int(word.partition("=")[2]) for word in argv if word.startswith("--step=")]
            return evaluate_as_rank(load(argv[2]), Path(run_dir), next(iter(steps), None), "--json" in argv)
        if argv[1:2] == ["--calibrate"]:
            from moeflow.cli.calibrate import calibrate_as_rank

            return calibrate_as_rank(load(Path(run_dir) / "config.yaml"), Path(argv[2]))
        from moeflow.train.launch import work

        return work(load(Path(run_dir) / "config.yaml"), run_dir, resume)
    except KeyboardInterrupt as stop:
        return stopped_code(stop)
    except MoeflowError as error:
        report(error, Path(run_dir))
        return error.exit_code


def report(error: MoeflowError, run_dir: Path) -> None:
    """Print an error once, however many ranks met it: the first to make its file in the run folder prints."""
    name = hashlib.blake2b(f"{error.what}{error.mend}".encode(), digest_size=6).hexdigest()
    folder = run_dir / "errors"
    try:
        folder.mkdir(exist_ok=True)
        with open(folder / f"{name}-{os.getppid()}.txt", "x", encoding="utf-8") as file:
            file.write(f"rank {logging.rank()}: {error}\n")
    except FileExistsError:
        return
    except OSError as problem:
        print(f"(the error cannot be kept in {folder}: {problem})", file=sys.stderr)
    where = "" if logging.rank() == 0 else f"[rank {logging.rank()}] "
    print(f"{where}error: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
