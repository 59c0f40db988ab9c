"""DeepSpeed-MoE's checkpoints: the same output here."""

from pathlib import Path

import pytest
import torch
from torch import nn

from moeflow.cli.main import main
from moeflow.compat import deepspeed_moe
from moeflow.errors import CheckpointError
from moeflow.models.mlp import DenseMLP
from moeflow.moe import MoELayer
from moeflow.moe.shared import ResidualExperts
from tests.distributed import run_scripts


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """That of deepspeed_script.py, with our layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.plain = MoELayer(8, 4, 12)
        self.residual = MoELayer(8, 4, 12, shared=ResidualExperts(Mlp(), 8))
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.residual(self.plain(self.first(x))))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_checkpoint_that_deepspeed_made(tmp_path, stage):
    pytest.importorskip("deepspeed")
    run_scripts([str(Path(__file__).with_name("deepspeed_script.py")), str(tmp_path), str(stage)], 2, timeout=200)
    tensors = deepspeed_moe.load(tmp_path)
    net = Net().eval()
    net.load_state_dict(tensors)
    saved = torch.load(tmp_path / "io.pt", weights_only=True)
    torch.testing.assert_close(net(saved["x"]), saved["y"], atol=1e-5, rtol=1e-5)


def write(folder, net, number_of_experts=4):
    """`net`'s parameters as DeepSpeed lays them out (seen in a checkpoint that it made)."""
    folder.mkdir(parents=True)
    dense, experts = {}, {}
    names = {"w_in": "up.weight", "b_in": "up.bias", "w_out": "down.weight", "b_out": "down.bias"}
    for name, value in net.state_dict().items():
        layer, mark, last = name.partition(".experts.")
        if mark:
            for number in range(number_of_experts):
                key = f"{layer}.deepspeed_moe.experts.deepspeed_experts.{number}.{names[last]}"
                experts.setdefault((layer, number), {})[key] = value[number]
        else:
            dense[name.replace(".gate.proj.", ".deepspeed_moe.gate.wg.").replace(".shared.", ".")] = value
    torch.save({"module": dense, "ds_version": "0.19"}, folder / "mp_rank_00_model_states.pt")
    layers = sorted({layer for layer, _ in experts})
    for (layer, number), table in experts.items():
        torch.save(table, folder / f"layer_{layers.index(layer)}_expert_{number}_mp_rank_00_model_states.pt")
    (folder.parent / "latest").write_text(folder.name)


def test_names_and_stacks(tmp_path):
    torch.manual_seed(0)
    net = Net()
    write(tmp_path / "step9", net)
    tensors = deepspeed_moe.load(tmp_path)
    assert tensors.keys() == net.state_dict().keys()
    assert all(torch.equal(value, tensors[name]) for name, value in net.state_dict().items())
    renamed = deepspeed_moe.load(tmp_path / "step9", {"plain": "block.moe", "plain.gate": "gate"})
    assert {"block.moe.experts.w_in", "gate.proj.weight", "first.weight"} <= renamed.keys()


def test_experts_of_another_kind_keep_their_names(tmp_path):
    layer = "moe.deepspeed_moe.experts.deepspeed_experts"
    torch.save({"module": {"a": torch.ones(2)}}, tmp_path / "mp_rank_00_model_states.pt")
    for number in range(2):
        table = {f"{layer}.{number}.{name}.weight": p for name, p in DenseMLP(4, 6, 0.1, 0.1).named_children()
                 for p in [p.weight.detach()]}  # fmt: skip
        torch.save(table, tmp_path / f"layer_0_expert_{number}_mp_rank_00_model_states.pt")
    tensors = deepspeed_moe.load(tmp_path)
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    assert shapes == {
        "a": (2,),
        "moe.experts.gate__weight": (2, 6, 4),
        "moe.experts.up__weight": (2, 6, 4),
        "moe.experts.down__weight": (2, 4, 6),
    }


def harm_missing(tag):
    (tag / "layer_0_expert_1_mp_rank_00_model_states.pt").unlink()


def harm_truncate(tag):
    path = tag / "layer_1_expert_0_mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:200])


def harm_object(tag):
    torch.save({"module": {}, "client": Path("x"), "f": print}, tag / "mp_rank_00_model_states.pt")


def harm_cut(tag):
    (tag / "mp_rank_01_model_states.pt").touch()


def harm_pointer(tag):
    (tag.parent / "latest").write_text("../../elsewhere")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (harm_missing, "are missing"),
        (harm_truncate, "damaged"),
        (harm_object, "more than tensors"),
        (harm_cut, "cut over ranks"),
        (harm_pointer, "not there"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, harm, message):
    write(tmp_path / "step9", Net())
    harm(tmp_path / "step9")
    with pytest.raises(CheckpointError, match=message):
        deepspeed_moe.load(tmp_path)


def test_import_into_a_run(tmp_path, capsys):
    """A network whose names are those of a recipe's model, but for the beginning."""
    from moeflow.config import compose
    from moeflow.models import build_model
    from moeflow.models.init import initialize

    words = ["+recipe=cifar_tutorial_moe", "model.num_experts=4", "data.source=synthetic", "parallel.ep=1",
             "launch.processes=1"]  # fmt: skip
    config = compose(words)
    net = build_model(config.model, config.gate)
    initialize(net, 3)
    write(tmp_path / "ds" / "tag", nn.ModuleDict({"net": net}))
    code = main(["ckpt", "import", str(tmp_path / "ds"), str(tmp_path / "run"), *words])
    assert (code, "do not fit" in capsys.readouterr().err) == (2, True)
    code = main(["ckpt", "import", str(tmp_path / "ds"), str(tmp_path / "run"), *words, "--rename", "net.:"])
    assert code == 0, capsys.readouterr().err
    from tests.train.test_runs import saved_tensors

    saved = saved_tensors(tmp_path / "run", 0)
    assert saved.keys() == {f"model/{name}" for name in net.state_dict()}
    assert all(torch.equal(value, saved[f"model/{name}"]) for name, value in net.state_dict().items())
