"""For those who come from DeepSpeed: its checkpoints, and experts spread over the ranks in a script for it.

    load(folder)                     what DeepSpeed-MoE saved, as a state dict for a network with `MoELayer`s
    spread(model, ep=N)              this rank's part of such a network, for `deepspeed.initialize`; see
                                     docs/examples/deepspeed_moe.py

A checkpoint of DeepSpeed-MoE has one file of the dense part, and one for each expert of each MoE layer.

    TAG/mp_rank_00_model_states.pt                      "module": parameters outside the experts
    TAG/layer_L_expert_E_mp_rank_00_model_states.pt     parameters of expert E of the L-th MoE layer
    latest                                              names TAG

Read with torch's unpickler for plain data alone.  Names become those of the same network with a `MoELayer` in the place
of each `deepspeed.moe.layer.MoE`:

    X.deepspeed_moe.gate.wg.weight                        X.gate.proj.weight
    X.deepspeed_moe.experts.deepspeed_experts.E.NAME      X.experts.w_in, b_in, w_out, b_out (two linear layers),
                                                          or X.experts.NAME with "__" for dots (any other module)
    X.mlp.NAME, X.coefficient.NAME (residual)             X.shared.mlp.NAME, X.shared.coefficient.NAME

Legend: E experts, D model, F ffn.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeflow.errors import CheckpointError
from moeflow.parallel.engines.script import Spread, spread

__all__ = ["Spread", "is_checkpoint", "load", "spread"]

_DENSE = "mp_rank_00_model_states.pt"
_EXPERT_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT = re.compile(r"(.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(\d+)\.(.+)")
_GATE = ".deepspeed_moe.gate.wg."
# Of two linear layers, in their order in the module: ours by (place, kind).
_MLP = {(0, "weight"): "w_in", (0, "bias"): "b_in", (1, "weight"): "w_out", (1, "bias"): "b_out"}


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder, or the one that its `latest` names, holds a checkpoint of DeepSpeed."""
    try:
        return (_tagged(folder) / _DENSE).is_file()
    except CheckpointError:
        return False


def load(folder: str | Path, rename: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Read the parameters of a checkpoint, fp32, experts stacked [E, ...].

    Args:
        folder: the one with `latest`, or that of one tag.
        rename: beginning of a name -> what stands there instead; the longest that fits is taken.

    Raises:
        CheckpointError: files are missing or damaged, or the checkpoint is cut over model-parallel ranks or by ZeRO-3.
    """
    folder = _tagged(Path(folder))
    if list(folder.glob("zero_pp_rank_*_model_states.pt")) or (folder / "mp_rank_01_model_states.pt").exists():
        raise CheckpointError(
            f"{folder} is cut over ranks (ZeRO-3, or model parallelism)",
            "python zero_to_fp32.py, which DeepSpeed puts beside it, makes one file; or save with ZeRO 0 to 2",
        )
    dense = _read(folder / _DENSE).get("module")
    if not isinstance(dense, dict):
        raise CheckpointError(f"{folder / _DENSE} holds no 'module'")
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for path in sorted(folder.glob("layer_*_expert_*_model_states.pt")):
        match = _EXPERT_FILE.fullmatch(path.name)
        if match is None or match[3] != "00":
            raise CheckpointError(f"{path} is of a model-parallel rank", "save without model parallelism")
        for name, tensor in _tensors(_read(path)).items():
            found = _EXPERT.fullmatch(name)
            if found is None:
                raise CheckpointError(f"{path}: '{name}' is no parameter of an expert")
            experts.setdefault(found[1], {}).setdefault(int(found[2]), {})[found[3]] = tensor
    out: dict[str, Tensor] = {}
    for name, tensor in _tensors(dense).items():
        if _EXPERT.fullmatch(name) is None:  # copies, in some versions
            out[_ours(name, set(experts))] = tensor.float()
    for layer, by_number in experts.items():
        if sorted(by_number) != list(range(len(by_number))):
            raise CheckpointError(f"{folder}: experts of '{layer}' are missing; there: {sorted(by_number)}")
        out.update(_stacked(layer, [by_number[number] for number in range(len(by_number))]))
    return {_renamed(name, rename or {}): tensor for name, tensor in out.items()}


def _ours(name: str, layers: set[str]) -> str:
    if _GATE in name:
        return name.replace(_GATE, ".gate.proj.")
    for layer in layers:
        for part in ("mlp", "coefficient"):
            if name.startswith(f"{layer}.{part}."):
                return f"{layer}.shared.{name.removeprefix(f'{layer}.')}"
    return name


def _stacked(layer: str, experts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = list(experts[0])
    if any(list(expert) != names for expert in experts):
        raise CheckpointError(f"experts of '{layer}' have different parameters")
    stacks = {name: torch.stack([expert[name].float() for expert in experts]) for name in names}
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    kinds = {(modules.index(n.rpartition(".")[0]), n.rpartition(".")[2]): n for n in names}
    if len(modules) == 2 and kinds.keys() <= _MLP.keys() and _is_mlp(stacks, kinds):
        return {f"{layer}.experts.{_MLP[place]}": stacks[name] for place, name in kinds.items()}
    return {f"{layer}.experts.{name.replace('.', '__')}": stack for name, stack in stacks.items()}


def _is_mlp(stacks: dict[str, Tensor], kinds: dict[tuple[int, str], str]) -> bool:
    first, second = stacks[kinds[0, "weight"]], stacks[kinds[1, "weight"]]  # [E, F, D], [E, D, F]
    return first.ndim == second.ndim == 3 and first.shape[1] == second.shape[2]


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    fitting = [old for old in rename if name.startswith(old)]
    if not fitting:
        return name
    old = max(fitting, key=len)
    return rename[old] + name[len(old) :]


def _tagged(folder: Path) -> Path:
    pointer = folder / "latest"
    if (folder / _DENSE).is_file() or not pointer.is_file():
        return folder
    # A name inside the folder, whatever the file says.
    name = Path(pointer.read_text(encoding="utf-8", errors="replace").strip()).name
    if not name or not (folder / name).is_dir():
        raise CheckpointError(f"{pointer} names '{name}', which is not there")
    return folder / name


def _read(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing", "give the folder that DeepSpeed's save_checkpoint made") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values: {str(error).splitlines()[0]}",
            "nothing of it was run; save it anew without objects in client_state",
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0] if str(error) else error!r}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is damaged: it holds no table")
    return content


def _tensors(table: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in table.items() if isinstance(value, Tensor)}
