"""`moeflow calibrate`: measure the cost model's coefficients on the layout at hand, and write them to a file."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from moeflow import logging
from moeflow.cli.arguments import Arguments, add_config_dir, add_verbosity
from moeflow.cli.train import compose_words
from moeflow.config.plain import load, save
from moeflow.errors import ConfigError
from moeflow.parallel.environment import detect
from moeflow.schema import RunConfig

DEFAULT_OUT = "profile.json"


def arguments() -> Arguments:
    """Return the flags of `moeflow calibrate`."""
    parser = Arguments("calibrate")
    parser.flag("--out", metavar="FILE", default=DEFAULT_OUT, help=f"where to write them ({DEFAULT_OUT})")
    parser.flag("--force", action="store_true", help="write over a file that is there")
    add_config_dir(parser)
    add_verbosity(parser)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str]) -> int:
    """Run `moeflow calibrate`; returns the exit code."""
    parser = arguments()
    args = parser.read(argv)
    if args.help:
        print(parser.help_text())
        return 0
    logging.setup(args.verbosity)
    launched = detect()
    out = Path(args.out).absolute()
    if out.exists() and not args.force and logging.rank() == 0:
        raise ConfigError(f"--out {args.out} exists", "--force, or another name")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {args.out}: the folder {out.parent} does not exist", f"mkdir -p {out.parent}")
    composition = compose_words(args, launched)
    with tempfile.TemporaryDirectory(prefix="moeflow-calibrate-") as folder:
        file = Path(folder) / "config.yaml"
        save(composition.config, file)
        config = load(file)
        _check(config)
        if launched is not None or config.launch.processes == 1:
            return calibrate_as_rank(config, out)
        from moeflow.train.launch import start_ranks

        return start_ranks(config, [folder, "--calibrate", str(out)])


def _check(config: RunConfig) -> None:
    if not hasattr(config.model, "num_experts") or config.model.num_experts < 1:
        raise ConfigError(f"model={config.model.name} has no experts to measure", "a recipe with experts")


def calibrate_as_rank(config: RunConfig, out: Path) -> int:
    """Measure as one rank; rank 0 writes and prints.  Returns the exit code."""
    from moeflow.parallel.measure import described, measure_profile
    from moeflow.parallel.prepare import leave
    from moeflow.plan.profile import save_profile
    from moeflow.train.session import expert_of, join

    accelerator, topology = join(config)
    try:
        shape = expert_of(config, topology)
        profile = measure_profile(topology, shape, accelerator.device)
    finally:
        leave()
    if logging.rank() == 0:
        save_profile(profile, out)
        print(described(profile, shape))
        print(
            f"written to {out}; a run takes them by balance.profile={out}, moeflow plan by --profile {out}", flush=True
        )
    return 0
