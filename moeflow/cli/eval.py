"""`moeflow eval`: the test figures of a checkpoint."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from moeflow import logging
from moeflow.cli.arguments import Arguments, add_verbosity
from moeflow.cli.resume import run_dir_first, step_number
from moeflow.config.changes import Change, amend, differences
from moeflow.config.plain import load, save
from moeflow.config.problems import Problem, raise_any
from moeflow.config.rules import validate
from moeflow.parallel.environment import detect
from moeflow.schema import RunConfig
from moeflow.train import rundir

logger = logging.get_logger(__name__)

#: Keys that may differ from the run's: where, on what and on which samples the checkpoint is evaluated.
_FREE = (
    *("data.root", "data.path", "data.source", "data.on_missing", "data.download", "data.num_workers"),
    *("data.eval_", "data.batch_size", "data.channels_last", "parallel.", "balance.", "launch.", "precision.", "ops."),
    *("trainer.eval_", "trainer.compile", "gate.eval_capacity_factor"),
)


def arguments() -> Arguments:
    """Return the flags of `moeflow eval`."""
    parser = Arguments("eval", words="words")
    parser.flag("--step", metavar="N", help="checkpoint to evaluate; the latest where left out")
    parser.flag("--json", action="store_true", help="print one JSON object")
    add_verbosity(parser)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    """Run `moeflow eval`; returns the exit code."""
    parser = arguments()
    args = parser.read(argv)
    if args.help:
        print(parser.help_text())
        return 0
    logging.setup(args.verbosity)
    folder, words = run_dir_first(args.words, "eval")
    run = rundir.open(folder)
    config = _amended(load(run.config), words)
    return _evaluate(config, run, step_number(args.step), args.json)


def _amended(old: RunConfig, words: list[str]) -> RunConfig:
    config = amend(old, words)
    raise_any([_refusal(change) for change in differences(old, config) if not change.key.startswith(_FREE)])
    return config


def _refusal(change: Change) -> Problem:
    return Problem(f"{change}: the checkpoint was made with the old value.", f"leave {change.key} out")


def _evaluate(config: RunConfig, run: rundir.RunDir, step: int | None, as_json: bool) -> int:
    launched = detect()
    validate(config, None if launched is None else launched.world)
    if launched is not None or config.launch.processes == 1:
        return evaluate_as_rank(config, run.path, step, as_json)
    from moeflow.train.launch import start_ranks

    with tempfile.TemporaryDirectory(prefix="moeflow-eval-") as folder:
        # The ranks read a file, as in training; the run folder itself is left as it is.
        save(config, Path(folder) / rundir.CONFIG)
        words = [str(run.path), "--eval", str(Path(folder) / rundir.CONFIG)]
        words += [f"--step={step}"] if step is not None else []
        return start_ranks(config, [*words, *(["--json"] if as_json else [])])


def evaluate_as_rank(config: RunConfig, run_dir: Path, step: int | None, as_json: bool) -> int:
    """Evaluate in this process, as one rank; rank 0 prints the result.  Returns the exit code."""
    from moeflow.train.job import evaluate_run

    result = evaluate_run(config, run_dir, step)
    if logging.rank() == 0:
        print(_text(result, as_json))
        sys.stdout.flush()
    return 0


def _text(result: dict[str, Any], as_json: bool) -> str:
    if as_json:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in result.items()
        }
        return json.dumps(finite)
    width = max(map(len, result))
    return "\n".join(
        f"{key:<{width}}  {value:.4f}" if isinstance(value, float) else f"{key:<{width}}  {value}"
        for key, value in result.items()
    )
