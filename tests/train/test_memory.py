"""The room that a model takes at least, on each engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moeflow.errors import ResourceError
from moeflow.models import build_model
from moeflow.parallel.topology import Topology
from moeflow.schema import OptimConfig, PrecisionConfig
from moeflow.schema.layout import Layout
from moeflow.train import memory
from tests.parallel.gpt_run import config_of

# Four ranks, ep 2: dp is 4 and edp 2.  fp32 copies of a dense parameter, and of an expert's.
COPIES = [
    ({}, {}, 4, 4),
    ({"engine": "deepspeed", "zero_stage": 0}, {}, 4, 4),
    ({"engine": "deepspeed"}, {}, 1 + 4 / 4, 1 + 4 / 2),
    ({"engine": "deepspeed", "zero_stage": 2}, {"precision": PrecisionConfig("bf16")}, 0.5 + 4 / 4, 0.5 + 4 / 2),
    ({"engine": "deepspeed", "ds_config": '{"zero_optimization": {"stage": 0}}'}, {}, 4, 4),
    ({"engine": "fsdp"}, {}, 1, 4 / 2),
    ({"engine": "fsdp"}, {"optim": OptimConfig(name="sgd")}, 1, 3 / 2),
]


@pytest.mark.parametrize(("parallel", "more", "dense", "experts"), COPIES, ids=str)
def test_room_of_each_engine(parallel, more, dense, experts, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    config = config_of({"ep": 2, **parallel}, model={"vocab_size": 64}, **more)
    with torch.device("meta"):
        model = build_model(config.model, config.gate)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    whole = sum(size for name, size in sizes.items() if ".experts." in name)
    needed = 4 * ((sum(sizes.values()) - whole) * dense + whole / 2 * experts)

    def fits(free):
        found = SimpleNamespace(available=free, free=0)
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: found)
        monkeypatch.setattr(memory.psutil, "swap_memory", lambda: found)
        memory.check_room(model, config, Topology.imagined(Layout(4, 1, 1, 2, 1), 0), torch.device("cpu"), True)

    fits(needed)
    with pytest.raises(ResourceError):
        fits(needed - 8)
