"""Activations against what autograd really saves in a forward pass."""

from __future__ import annotations

import pytest
import torch

from moeflow.models import build_model
from moeflow.models.init import initialize
from moeflow.plan.layouts import Candidate
from moeflow.plan.memory import layer_bytes
from moeflow.plan.model_size import gpt_size
from moeflow.schema import GPTConfig, NaiveGateConfig

BATCH, SEQ = 3, 80
MODELS = {
    "experts": {},
    "dense": {"num_experts": 0},
    "shared": {"shared_hidden": 160},
    "few keys": {"num_kv_heads": 2},
    "wide": {"expert_hidden": 400, "num_experts": 12},
}


def config(name, layers):
    return GPTConfig(
        **{"vocab_size": 64, "num_layers": layers, "d_model": 96, "num_heads": 6, "num_experts": 6, **MODELS[name]}
    )


def saved_bytes(config, gate, half):
    """Bytes of all storages that autograd keeps, parameters left out."""
    model = build_model(config, gate)
    initialize(model, 0)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor  # held, so that no address comes up twice
        return tensor

    tokens = torch.randint(0, 64, (BATCH, SEQ))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            output = model(tokens)
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_activations_of_a_block_are_what_autograd_saves(name, half):
    gate = NaiveGateConfig(top_k=3)
    one, three = (saved_bytes(config(name, layers), gate, half) for layers in (1, 3))
    size = gpt_size(config(name, 3), gate, SEQ)
    layer = size.layers[1]
    counted = layer_bytes(
        size, layer, Candidate(1, 1, 1, 1, 1, BATCH, 1, (3,)), "bf16" if half else "fp32", BATCH * SEQ, 1.0
    )
    if half:
        counted += 2 * layer.parameters  # copies of the parameters, which the memory table has in a row of its own
    assert (three - one) / 2 == pytest.approx(counted, rel=0.02)
