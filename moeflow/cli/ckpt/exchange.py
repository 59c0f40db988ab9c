"""`moeflow ckpt export` and `moeflow ckpt import`: Hugging Face folders."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from moeflow.cli.ckpt.make import begin_run, origin, read_run, settle_vocabulary
from moeflow.config.plain import load
from moeflow.config.rules import validate
from moeflow.errors import ConfigError, did_you_mean
from moeflow.schema import GPTConfig
from moeflow.train import rundir

_RECIPE = "gpt_moe"
_DTYPES = ("fp32", "bf16", "fp16")


def export_(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Write the model of a checkpoint as a Hugging Face folder."""
    if len(words) > 2:
        raise ConfigError(f"'{words[2]}': nothing follows the folders.", "moeflow ckpt --help")
    if args.dtype not in _DTYPES:
        raise ConfigError(f"--dtype {args.dtype}: must be fp32, bf16 or fp16.{did_you_mean(args.dtype, _DTYPES)}")
    run = rundir.open(words[0])
    config = load(run.config)
    if not isinstance(config.model, GPTConfig):
        raise ConfigError(
            f"model={config.model.name}: only gpt models have a counterpart at Hugging Face.", "a run with model=gpt"
        )
    from moeflow.compat.huggingface.folder import save_folder

    step, tensors, _ = read_run(run, args.step, "model/")
    config = settle_vocabulary(config, tensors)
    assert isinstance(config.model, GPTConfig)
    named = {key.removeprefix("model/"): tensor for key, tensor in tensors.items()}
    family = save_folder(Path(words[1]), named, config.model, config.gate, args.family, args.dtype)
    print(f"{words[1]}: step {step} as {family}, {args.dtype}")
    return 0


def import_(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Begin a run from a Hugging Face folder: its model and gate, everything else from a recipe and overrides."""
    source = Path(words[0])
    if not source.is_dir():
        raise ConfigError(f"there is no folder {source}.", "give a folder with config.json and *.safetensors")
    from moeflow.config.composition import compose_run

    overrides = list(words[2:])
    recipe = [] if any(word.startswith("+recipe=") for word in overrides) else [f"+recipe={_RECIPE}"]
    composition = compose_run([*recipe, *overrides])
    from moeflow.compat.huggingface.folder import load_folder

    model, gate, tensors = load_folder(source)
    config = composition.config
    config.model, config.gate = model, gate
    validate(config)
    came_from = origin("import", source, None, {"words": overrides})
    keyed = {f"model/{name}": tensor for name, tensor in tensors.items()}
    base = compose_run([*recipe, *(word for word in overrides if word.startswith("+recipe="))], rules=False).config
    begin_run(words[1], config, base, 0, keyed, came_from, overrides)
    return 0
