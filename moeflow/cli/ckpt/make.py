"""`moeflow ckpt reshard` and `moeflow ckpt experts`: a new run folder from a checkpoint."""

from __future__ import annotations

import argparse
import copy
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeflow.cli.resume import step_number
from moeflow.cli.runs import new_run, shown
from moeflow.config.changes import amend, differences, refused
from moeflow.config.plain import load
from moeflow.config.problems import raise_any
from moeflow.config.rules import validate
from moeflow.errors import ConfigError, MoeflowError
from moeflow.logging import get_logger
from moeflow.schema import RunConfig
from moeflow.train import rundir
from moeflow.train.files import json_bytes, write_atomic

if TYPE_CHECKING:
    from torch import Tensor

logger = get_logger(__name__)


def reshard_(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Copy a checkpoint into a new run of another layout, with or without the optimizer's state."""
    run = rundir.open(words[0])
    old = load(run.config)
    config = amend(old, list(words[2:]))
    raise_any(refused(differences(old, config)))
    step, tensors, meta = read_run(run, args.step, "model/" if args.weights_only else "")
    config = settle_vocabulary(config, tensors)
    validate(config)
    _check_layout(config)
    arguments = {"weights_only": args.weights_only, "words": list(words[2:])}
    begin_run(words[1], config, old, step, tensors, origin("reshard", run, step, arguments), words[2:], meta)
    return 0


def experts_(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Begin a run whose MoE layers have another number of experts."""
    from moeflow.compat import experts

    asked = {name: getattr(args, name) for name in ("duplicate", "drop", "keep", "upcycle")}
    asked = {name: value for name, value in asked.items() if value is not None}
    if len(asked) != 1:
        raise ConfigError(
            f"moeflow ckpt experts takes one of --duplicate, --drop, --keep and --upcycle, not {len(asked)}.",
            "moeflow ckpt experts RUN_DIR NEW_DIR --duplicate 2 --noise 0.01",
        )
    ((operation, value),) = asked.items()
    noise, seed = _decimal("--noise", args.noise), _whole("--seed", args.seed)
    run = rundir.open(words[0])
    old = load(run.config)
    step, tensors, meta = read_run(run, args.step, "model/" if operation == "upcycle" else "")
    old = settle_vocabulary(old, tensors)
    if operation == "upcycle":
        made, config = experts.upcycle(tensors, old, _whole("--upcycle", value, 1), noise, seed)
    else:
        chosen = _chosen(operation, value, old.model.num_experts)
        made, config = experts.select(tensors, old, chosen, noise, seed)
    before, after = old.model.num_experts, config.model.num_experts
    config = amend(config, list(words[2:]))
    validate(config)
    arguments = {operation: value, "noise": noise, "seed": seed, "experts_before": before, "experts_after": after}
    logger.info("experts of each MoE layer: %d -> %d (%s %s, noise %g)", before, after, operation, value, noise)
    # Upcycling begins a run of its own; otherwise the schedule and the samples go on.
    first = 0 if operation == "upcycle" else step
    begin_run(words[1], config, old, first, made, origin("experts", run, step, arguments), words[2:], meta)
    return 0


def read_run(run: rundir.RunDir, step_text: str | None, prefix: str) -> tuple[int, dict[str, Tensor], dict[str, Any]]:
    """Return step, tensors and meta of a checkpoint of a run."""
    from moeflow.train import whole
    from moeflow.train.checkpoint import CheckpointStore

    store = CheckpointStore(run.checkpoints)
    step = whole.pick(store, step_number(step_text))
    return step, whole.read(store, step, prefix), store.read_meta(step)


def settle_vocabulary(config: RunConfig, tensors: dict[str, Tensor]) -> RunConfig:
    """Write the size of the vocabulary, which a run may take from its data, into the configuration."""
    embedding = tensors.get("model/embed.weight")
    if embedding is not None and getattr(config.model, "vocab_size", 0) is None:
        config = copy.deepcopy(config)
        config.model.vocab_size = embedding.shape[0]  # type: ignore[attr-defined]
    return config


def origin(operation: str, source: rundir.RunDir | Path, step: int | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """What is kept of how a run came about: in origin.json, and in its first checkpoint."""
    path = source.path if isinstance(source, rundir.RunDir) else source.resolve()
    made = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"operation": operation, "source": str(path), "step": step, "arguments": arguments, "time": made}


def begin_run(
    folder: str,
    config: RunConfig,
    base: RunConfig,
    step: int,
    tensors: dict[str, Tensor],
    came_from: dict[str, Any],
    words: Sequence[str],
    meta: dict[str, Any] | None = None,
) -> None:
    """Make a run folder with one checkpoint, whole or not at all, and say how to go on.

    Raises:
        MoeflowError: the folder is taken or cannot be written; it is gone again then.
    """
    from moeflow.train import whole

    _check_shapes(config, tensors)
    config = copy.deepcopy(config)
    config.run.dir = folder
    config.resume = None
    run = new_run(config, base, list(words))
    try:
        write_atomic(run.path / "origin.json", json_bytes(came_from))
        kept = {key: (meta or {}).get(key) for key in ("recipe", "data", "samples")}
        if step == 0:
            kept["samples"] = 0
        whole.begin(run.checkpoints, step, tensors, {**kept, whole.ORIGIN: came_from})
        run.mark("interrupted")
    except (MoeflowError, OSError) as error:
        shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"{run.path} cannot be written: {error.strerror or error}.") from error
        raise
    count = sum(tensor.numel() for key, tensor in tensors.items() if key.startswith("model/"))
    print(f"{shown(run.path)}: step {step}, {count:,} values of the model")
    print(f"go on with: moeflow resume {shown(run.path)}")


def _check_shapes(config: RunConfig, tensors: dict[str, Tensor]) -> None:
    """Refuse a configuration whose model is not that of the tensors."""
    from moeflow.compat.experts import shapes_of

    wanted = shapes_of(config)
    held = {key.removeprefix("model/"): tensor.shape for key, tensor in tensors.items() if key.startswith("model/")}
    wrong = [name for name in {**wanted, **held} if wanted.get(name) != held.get(name)]
    if wrong:
        name = wrong[0]
        was, now = (list(table[name]) if name in table else "absent" for table in (held, wanted))
        raise ConfigError(
            f"the tensors do not fit the configuration: '{name}' is {was} in the checkpoint and {now} in the model "
            f"({len(wrong)} of {len(wanted)} differ).",
            "leave the overrides of model and gate out",
        )


def _check_layout(config: RunConfig) -> None:
    """Refuse a layout that the model does not divide over, before anything is written."""
    import torch

    from moeflow.models import build_model
    from moeflow.parallel.inventory import take_stock
    from moeflow.schema.layout import Layout

    with torch.device("meta"):
        model = build_model(config.model, config.gate)
    parallel = config.parallel
    layout = Layout(config.launch.processes, parallel.pp, parallel.tp, parallel.ep, parallel.etp)
    take_stock(model, layout, parallel)


def _chosen(operation: str, value: str, num_experts: int) -> list[int]:
    if operation == "duplicate":
        return [*range(num_experts)] * _whole("--duplicate", value, 1)
    listed = [_whole(f"--{operation}", word) for word in value.split(",")]
    outside = [number for number in listed if number >= num_experts]
    if outside:
        raise ConfigError(
            f"--{operation} {value}: the model has experts 0 to {num_experts - 1}.", "moeflow ckpt --help"
        )
    return listed if operation == "keep" else [e for e in range(num_experts) if e not in listed]


def _whole(flag: str, text: str, least: int = 0) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{flag} {text}: must be a whole number of at least {least}.", "moeflow ckpt --help")
    return int(text)


def _decimal(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{flag} {text}: must be a number of at least 0.", "moeflow ckpt --help")
    return value
