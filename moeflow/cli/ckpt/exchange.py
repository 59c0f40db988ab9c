"""`moeflow ckpt export` and `moeflow ckpt import`: Hugging Face folders, and DeepSpeed-MoE's checkpoints."""

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
    """Begin a run from elsewhere, all that the source does not say from a recipe and overrides.

    A Hugging Face folder brings model and gate.  A checkpoint of DeepSpeed-MoE brings parameters alone: they have to be
    those of the recipe's model.
    """
    source = Path(words[0])
    if not source.is_dir():
        raise ConfigError(f"there is no folder {source}.", "give a Hugging Face folder, or one of DeepSpeed's")
    from moeflow.config.composition import compose_run

    overrides = list(words[2:])
    recipe = [] if any(word.startswith("+recipe=") for word in overrides) else [f"+recipe={_RECIPE}"]
    composition = compose_run([*recipe, *overrides])
    config = composition.config
    from moeflow.compat import deepspeed_moe

    if deepspeed_moe.is_checkpoint(source):
        tensors = deepspeed_moe.load(source, dict(_pair(word) for word in args.rename))
        config = settle_vocabulary(config, {f"model/{name}": tensor for name, tensor in tensors.items()})
    else:
        from moeflow.compat.huggingface.folder import load_folder

        config.model, config.gate, tensors = load_folder(source)
    validate(config)
    came_from = origin("import", source, None, {"words": overrides})
    keyed = {f"model/{name}": tensor for name, tensor in tensors.items()}
    base = compose_run([*recipe, *(word for word in overrides if word.startswith("+recipe="))], rules=False).config
    begin_run(words[1], config, base, 0, keyed, came_from, overrides)
    return 0


def _pair(word: str) -> tuple[str, str]:
    old, mark, new = word.partition(":")
    if not mark:
        raise ConfigError(f"--rename {word}: must be OLD:NEW.", "--rename module.moe:moe")
    return old, new
