"""Another number of experts: copied, copied with noise, dropped, or made from dense MLPs.

All work on tensors by name, whole, and on a configuration; what they did is in the description that they return.

Legend: E experts, F ffn, D model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moeflow.errors import CheckpointError
from moeflow.models import build_model
from moeflow.models.init import generator_for
from moeflow.models.transformer import expert_width, hidden_width, is_moe_layer
from moeflow.schema import GPTConfig, RunConfig
from moeflow.schema.gate import NaiveGateConfig

Tensors = dict[str, Tensor]
_GATE_STD = 0.02


def shapes_of(config: RunConfig) -> dict[str, torch.Size]:
    """Shape of each parameter and persistent buffer of a run's whole model, by name."""
    with torch.device("meta"):
        model = build_model(config.model, config.gate)
    tied: Mapping[str, str] = getattr(model, "tied", {})
    return {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}


def select(
    tensors: Tensors, config: RunConfig, experts: Sequence[int], noise: float = 0.0, seed: int = 0
) -> tuple[Tensors, RunConfig]:
    """Give every MoE layer the experts `experts` of the old one, in that order; one may be taken several times.

    Args:
        tensors: parameters, buffers ("model/NAME") and the optimizer's state ("optimizer/NAME/KEY").
        config: of the run.
        experts: numbers of old experts.
        noise: deviation added to each copy after the first, relative to that of the expert's tensor; the gate's rows
            too, since copies with the same row would always be chosen together.
        seed: of the noise.

    Raises:
        CheckpointError: there are no experts, or not these.
    """
    before = config.model.num_experts
    wrong = [number for number in experts if not 0 <= number < before]
    if before == 0 or wrong or not experts:
        raise CheckpointError(
            f"experts {wrong or list(experts)} are not among those of the model (model.num_experts={before})"
        )
    after = copy.deepcopy(config)
    after.model.num_experts = len(experts)
    if isinstance(after.model, GPTConfig):
        # Derived from gate.top_k where it is null, which may be changed now.
        after.model.expert_hidden = expert_width(after.model, after.gate.top_k)
    old, new = shapes_of(config), shapes_of(after)
    # What has an expert dimension shows by its shape, whatever the gate and the experts are made of.
    changed = [name for name in old if old[name] != new[name]]
    for name in changed:
        assert (old[name][0], new[name][0]) == (before, len(experts)) and old[name][1:] == new[name][1:], name
    if len(experts) == before:
        changed = [name for name in old if ".experts." in name or ".gate." in name]
        changed = [name for name in changed if old[name][:1] == (before,)]
    index = torch.tensor(experts)
    repeats = [number in experts[:place] for place, number in enumerate(experts)]
    out = dict(tensors)
    for key in tensors:
        part, _, rest = key.partition("/")
        name = rest if part == "model" else rest.rpartition("/")[0]
        if name in changed and tensors[key].shape == old[name]:
            out[key] = tensors[key][index].clone()
            if part == "model" and noise:
                _disturb(out[key], repeats, noise, (seed, name))
    return out, after


def _disturb(tensor: Tensor, repeats: Sequence[bool], noise: float, keys: tuple[object, ...]) -> None:
    for place, repeated in enumerate(repeats):
        if repeated:
            row = tensor[place]
            std = row.std(unbiased=False)
            row += noise * std * torch.randn(row.shape, generator=generator_for(*keys, place), dtype=row.dtype)


def upcycle(
    tensors: Tensors, config: RunConfig, num_experts: int, noise: float = 0.0, seed: int = 0
) -> tuple[Tensors, RunConfig]:
    """Make each dense MLP of a `gpt` model an MoE layer of copies (sparse upcycling, arXiv:2212.05055, section 3).

    Weights of a token's experts sum to one, so without noise the model computes what it did before.

    Args:
        tensors: parameters ("model/NAME"); the optimizer's state is left behind.
        config: of the run; `model.moe_every`, `model.moe_offset` and `model.first_dense` say which blocks.
        num_experts: of each layer.
        noise: deviation added to every copy but the first, relative to that of the tensor.
        seed: of the noise and of the gates' initial values.

    Raises:
        CheckpointError: the model is not dense, or no `gpt`.
    """
    model = config.model
    if not isinstance(model, GPTConfig) or model.num_experts != 0:
        raise CheckpointError(
            f"model={model.name} with model.num_experts={model.num_experts}: only a dense gpt model can be upcycled",
            "--duplicate makes more experts of those that a model has",
        )
    after = copy.deepcopy(config)
    assert isinstance(after.model, GPTConfig)
    after.model.num_experts = num_experts
    after.model.d_hidden = after.model.expert_hidden = hidden_width(model)
    if not isinstance(after.gate, NaiveGateConfig):
        after.gate = NaiveGateConfig()
    after.gate.top_k = min(after.gate.top_k, num_experts)
    after.gate.renormalize, after.gate.scaling = "before", 1.0
    out = {key: tensor for key, tensor in tensors.items() if key.startswith("model/")}
    for layer in range(model.num_layers):
        if not is_moe_layer(after.model, layer):
            continue
        prefix = f"model/blocks.{layer}.mlp"
        gate, up, down = (out.pop(f"{prefix}.{matrix}.weight") for matrix in ("gate", "up", "down"))
        parts = {f"{prefix}.experts.w_in": torch.stack([gate, up]), f"{prefix}.experts.w_out": down}
        for key, one in parts.items():
            out[key] = one.expand(num_experts, *one.shape).clone()
            if noise:
                _disturb(out[key], [False] + [True] * (num_experts - 1), noise, (seed, key))
        key = f"{prefix}.gate.proj.weight"
        out[key] = torch.randn(num_experts, model.d_model, generator=generator_for(seed, key)) * _GATE_STD
    return out, after
