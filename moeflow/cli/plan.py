"""`moeflow plan`: layouts for a model and a cluster, with predicted time, memory and reasons; nothing is started."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from moeflow import logging
from moeflow.cli.arguments import Arguments, add_config_dir, add_verbosity
from moeflow.cli.train import compose_words
from moeflow.errors import ConfigError

if TYPE_CHECKING:
    from moeflow.plan.balance_study import Study
    from moeflow.plan.cluster import Cluster
    from moeflow.plan.model_size import ModelSize
    from moeflow.plan.search import Proposal
    from moeflow.schema import RunConfig

_AXES = ("pp", "tp", "ep", "etp")
#: Words that the plan decides; axes that the user names are kept, the others are replaced.
_DECIDED = ("launch.processes", "trainer.grad_accum", "parallel.pp_microbatches", "parallel.pp_schedule")

_EXAMPLES = """\
examples:
  moeflow plan +recipe=gpt_moe --device a100 --ranks 16
  moeflow plan +recipe=gpt_moe parallel.tp=2 --cluster cluster.yaml
  moeflow plan +recipe=gpt_moe --device h100 --ranks 64 --trace trace.npz --apply gpt.words
  moeflow train $(cat gpt.words)

An axis named among the words (parallel.tp=2) is kept; the others are free.  docs/balance.md has the formulas and the
format of the files."""


def arguments() -> Arguments:
    """Return the flags of `moeflow plan`."""
    parser = Arguments("plan")
    parser.flag("--cluster", metavar="FILE", help="description of the cluster (YAML or JSON)")
    parser.flag("--device", metavar="NAME", help="default coefficients of a device: cpu, v100, a100, h100, h200, b200")
    parser.flag("--ranks", metavar="N", type=int, help="processes in all (launch.processes where left out)")
    parser.flag("--per-node", metavar="N", type=int, help="processes of one node (8, or all where there are fewer)")
    parser.flag("--profile", metavar="FILE", help="measured coefficients in place of the device's")
    parser.flag("--imbalance", metavar="X", type=float, help="rows of the busiest rank over the mean (1.2)")
    parser.flag("--trace", metavar="FILE", help="recorded routing (.npz): imbalance, and what balancing would bring")
    parser.flag("--no-overlap", action="store_true", help="predict without chunks that overlap the exchange")
    parser.flag("--keep", metavar="N", type=int, default=5, help="layouts to list (5)")
    parser.flag("--apply", metavar="FILE", help="write the words of the best layout, one a line, for moeflow train")
    parser.flag("--json", action="store_true", help="print one JSON object")
    add_config_dir(parser)
    add_verbosity(parser)
    return parser


def main(argv: list[str]) -> int:
    """Run `moeflow plan`; returns the exit code."""
    parser = arguments()
    args = parser.read(argv)
    if args.help:
        print(f"{parser.help_text()}\n\n{_EXAMPLES}")
        return 0
    logging.setup(args.verbosity)
    _check(args)
    from moeflow.cli.plan_report import as_json, as_text
    from moeflow.plan.search import search
    from moeflow.plan.step_time import StepModel

    kept, fixed, processes = split_words(args.overrides)
    config = compose_words(argparse.Namespace(**{**vars(args), "overrides": kept}), None).config
    model = model_size(config)
    cluster = _cluster(args, processes or config.launch.processes)
    study = _study(args, model, config, cluster)
    imbalance = study.by_ranks if study is not None else (args.imbalance or 1.2)
    steps = StepModel(model, cluster, config.precision.dtype, imbalance, not args.no_overlap)
    if any(word.lstrip("+").startswith("model.activation_checkpointing=") for word in kept):
        fixed["checkpointing"] = int(config.model.activation_checkpointing)  # type: ignore[attr-defined]
    found = search(steps, config.data.batch_size, args.keep, fixed)
    words = plan_words(found.proposals[0], config)
    if args.apply:
        _write(Path(args.apply), kept, words, args.config_dir)
    if args.json:
        print(json.dumps(as_json(steps, found, study, words)))
    else:
        print(as_text(steps, found, study, words))
        if args.apply:
            print(f"\nwrote {args.apply}: moeflow train $(cat {args.apply})")
    return 0


def split_words(words: list[str]) -> tuple[list[str], dict[str, int], int | None]:
    """(words that stay, axes that are given, processes that are given)."""
    kept, fixed, processes = [], {}, None
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        axis = key.removeprefix("parallel.")
        if key == f"parallel.{axis}" and axis in _AXES:
            fixed[axis] = _whole(key, value)
        elif key == "launch.processes":
            processes = _whole(key, value)
        elif key not in _DECIDED:
            kept.append(word)
    return kept, fixed, processes


def _whole(key: str, value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"{key}={value}: must be a whole number above 0", f"{key}=1")
    return int(value)


def _check(args: argparse.Namespace) -> None:
    if args.cluster and (args.device or args.ranks or args.per_node):
        raise ConfigError(
            "--cluster describes device, ranks and nodes; --device, --ranks and --per-node cannot stand beside it",
            "the file, or the flags",
        )
    for flag in ("ranks", "per_node", "keep"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')} {value}: must be above 0", f"--{flag.replace('_', '-')} 8")
    if args.imbalance is not None and args.imbalance < 1:
        raise ConfigError(f"--imbalance {args.imbalance}: the busiest rank has at least the mean", "--imbalance 1.2")
    if args.imbalance is not None and args.trace:
        raise ConfigError("--trace tells the imbalance; --imbalance cannot stand beside it", "one of both")


def model_size(config: RunConfig) -> ModelSize:
    """Sizes of the configured model.

    Raises:
        ConfigError: it is no language model.
    """
    from moeflow.plan.model_size import gpt_size
    from moeflow.schema import GPTConfig, TextData

    if not isinstance(config.model, GPTConfig) or not isinstance(config.data, TextData):
        raise ConfigError(
            f"moeflow plan counts language models; this one is model={config.model.name} data={config.data.name}",
            "moeflow plan +recipe=gpt_moe; moeflow topology shows what ranks hold for any model",
        )
    if config.model.vocab_size is None:
        from moeflow.train.sizes import fill_vocabulary

        fill_vocabulary(config)
    return gpt_size(config.model, config.gate, config.data.seq_len)


def _cluster(args: argparse.Namespace, processes: int) -> Cluster:
    from moeflow.plan.cluster import cluster_for, load_cluster
    from moeflow.plan.profile import load_profile

    if args.cluster:
        cluster = load_cluster(args.cluster)
    else:
        cluster = cluster_for(args.device or "cpu", args.ranks or processes, args.per_node)
    if args.profile:
        cluster = dataclasses.replace(cluster, profile=load_profile(args.profile))
    return cluster


def _study(args: argparse.Namespace, model: ModelSize, config: RunConfig, cluster: Cluster) -> Study | None:
    if not args.trace:
        return None
    from moeflow.plan.balance_study import study
    from moeflow.plan.traces import load_trace

    return study(load_trace(args.trace), model, cluster, config.precision.dtype)


def plan_words(best: Proposal, config: RunConfig) -> list[str]:
    """Overrides of a proposal; those that this version of the configuration knows."""
    plan = best.plan
    words = [f"launch.processes={plan.world}", *(f"parallel.{axis}={getattr(plan, axis)}" for axis in _AXES)]
    if plan.pp > 1:
        words += [
            "trainer.grad_accum=1",
            f"parallel.pp_microbatches={plan.micro_batches}",
            "parallel.pp_schedule=1f1b",
        ]
    else:
        words.append(f"trainer.grad_accum={plan.micro_batches}")
    words.append(f"model.activation_checkpointing={str(plan.checkpointing).lower()}")
    if hasattr(getattr(config, "overlap", None), "chunks"):
        words.append(f"overlap.chunks={best.time.chunks}")
    return words


def _write(path: Path, kept: list[str], words: list[str], config_dirs: list[str]) -> None:
    from moeflow.config.composition import compose_run

    decided = {word.partition("=")[0] for word in words}
    lines = [word for word in kept if word.lstrip("+").partition("=")[0] not in decided] + words
    compose_run(lines, config_dirs)  # what is written can be trained
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
