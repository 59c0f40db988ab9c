"""Files of a Hugging Face folder: config.json, model.safetensors or numbered parts with an index."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moeflow.compat.huggingface.families import choose_family, read_config, write_config
from moeflow.compat.huggingface.weights import from_huggingface, to_huggingface
from moeflow.errors import CheckpointError
from moeflow.schema.gate import GateConfig
from moeflow.schema.model import GPTConfig

INDEX = "model.safetensors.index.json"
PART_BYTES = 5 * 10**9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_folder(folder: Path) -> tuple[GPTConfig, GateConfig, dict[str, Tensor]]:
    """Read a model.

    Args:
        folder: with config.json and safetensors.

    Returns:
        Options of the model and the gate, and the tensors of our model by name, fp32.

    Raises:
        CheckpointError: a file is missing or damaged, or the model is of a kind that is not known here.
    """
    source = _read_json(folder / "config.json")
    family, model, gate = read_config(source)
    tensors = from_huggingface(_read_tensors(folder), family, model, source.get("rope_interleave", True))
    return model, gate, tensors


def save_folder(
    folder: Path, tensors: dict[str, Tensor], model: GPTConfig, gate: GateConfig, family: str | None, dtype: str
) -> str:
    """Write a model, whole or not at all.

    Args:
        folder: new.
        tensors: of our model, by name.
        model: of the run.
        gate: of the run.
        family: a name of `FAMILIES`; None takes the first that fits.
        dtype: a key of `DTYPES`.

    Returns:
        The family.

    Raises:
        CheckpointError: the model cannot be expressed, or the folder cannot be written.
    """
    chosen = choose_family(model, gate, family)
    number_format = DTYPES[dtype]
    out = {
        # The bias of a choice decides between neighbours; Transformers keeps it fp32 too.
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(number_format)
        for name, tensor in to_huggingface(tensors, chosen, model, gate).items()
    }
    vocab_size = tensors["embed.weight"].shape[0]
    config = write_config(chosen, model, gate, vocab_size, str(number_format).removeprefix("torch."))
    if folder.exists():
        raise CheckpointError(f"{folder} is there already; nothing is overwritten", "another folder")
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
        _write_tensors(aside, out)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.rename(aside, folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return chosen.name


def _write_tensors(folder: Path, tensors: dict[str, Tensor], part_bytes: int = PART_BYTES) -> None:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > part_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    if len(parts) == 1:
        save_file(parts[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    places = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / INDEX).is_file():
        places = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise CheckpointError(f"{folder / INDEX} is damaged: it has no weight_map")
        # Names of files inside the folder alone, whatever the index says.
        files = sorted({Path(file).name for file in places.values()})
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no safetensors files", "save the model with safetensors first")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as stream:
                tensors.update({name: stream.get_tensor(name) for name in stream.keys()})  # noqa: SIM118 (no iteration)
        except FileNotFoundError:
            raise CheckpointError(f"{folder / file} is missing") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{folder / file} is damaged: {error}") from error
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} is no Hugging Face folder: it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds no table")
    return content
