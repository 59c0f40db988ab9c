"""`moeflow ckpt`: what it lists, makes and refuses; nothing that it reads is changed."""

import json
import shutil

import pytest
import torch

from moeflow.cli.main import main
from moeflow.config import load
from moeflow.train import rundir
from tests.train.runs import losses, moeflow
from tests.train.test_runs import saved_tensors

SMALL = [
    "data.source=synthetic", "data.seq_len=16", "model.num_layers=2", "model.d_model=32", "model.num_experts=4",
    "trainer.max_steps=8", "trainer.log_every=1", "trainer.eval_batches=1", "checkpoint.every=2", "launch.device=cpu",
    "launch.processes=1",
]  # fmt: skip


def text_run(folder, *words, recipe="gpt_moe"):
    moeflow("train", f"+recipe={recipe}", *SMALL, "trainer.stop_at=4", f"run.dir={folder}", *words)
    return folder


@pytest.fixture(scope="module")
def moe_run(tmp_path_factory):
    return text_run(tmp_path_factory.mktemp("moe") / "run")


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory):
    return text_run(tmp_path_factory.mktemp("dense") / "run", "model.num_experts=0", recipe="gpt_dense")


@pytest.fixture
def ckpt(capsys):
    """Call `moeflow ckpt` in this process; returns exit code, output and messages."""

    def call(*words):
        capsys.readouterr()
        code = main(["ckpt", *map(str, words)])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_ls_and_verify(ckpt, moe_run, tmp_path):
    before = contents(moe_run)
    code, out, _ = ckpt("ls", moe_run)
    assert code == 0
    lines = out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["2", "4"]
    assert "latest" in lines[1] and "1 process" in lines[1]
    assert ckpt("verify", moe_run)[:2] == (0, "step 2: good\nstep 4: good\n")
    assert contents(moe_run) == before

    copy = shutil.copytree(moe_run, tmp_path / "copy")
    (shard,) = (copy / "checkpoints" / "step_00000002").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    (copy / "checkpoints" / "step_00000004" / "meta.json").write_text("[]")
    code, out, _ = ckpt("verify", copy)
    assert code == 2
    assert f"{shard.name} is truncated" in out
    assert "meta.json is too" in out or "meta.json is truncated" in out
    code, out, _ = ckpt("ls", copy)
    assert code == 0 and "damaged" in out


def test_a_checkpoint_in_a_run_of_another_layout(ckpt, moe_run, tmp_path):
    before = contents(moe_run)
    code, out, _ = ckpt("reshard", moe_run, tmp_path / "new", "parallel.ep=2", "launch.processes=2")
    assert (code, "moeflow resume" in out) == (0, True)
    assert contents(moe_run) == before
    old, new = saved_tensors(moe_run, 4), saved_tensors(tmp_path / "new", 4)
    assert old.keys() == new.keys()
    assert all(torch.equal(value, new[key]) for key, value in old.items())
    assert load(tmp_path / "new" / "config.yaml").parallel.ep == 2
    assert rundir.open(tmp_path / "new").status()["state"] == "interrupted"


@pytest.mark.slow
@pytest.mark.distributed
def test_the_run_of_another_layout_goes_on_as_the_old_one(ckpt, moe_run, tmp_path):
    assert ckpt("reshard", moe_run, tmp_path / "new", "parallel.ep=2", "launch.processes=2")[0] == 0
    shutil.copytree(moe_run, tmp_path / "old")
    moeflow("resume", str(tmp_path / "old"), "trainer.stop_at=7")
    moeflow("resume", str(tmp_path / "new"), "trainer.stop_at=7")
    torch.testing.assert_close(
        torch.tensor(losses(tmp_path / "new")), torch.tensor(losses(tmp_path / "old")[4:]), rtol=1e-5, atol=0
    )


def test_weights_alone_start_with_a_new_optimizer(ckpt, moe_run, tmp_path):
    assert ckpt("reshard", moe_run, tmp_path / "new", "--weights-only", "--step", "2")[0] == 0
    assert all(key.startswith("model/") for key in saved_tensors(tmp_path / "new", 2))
    moeflow("resume", str(tmp_path / "new"), "trainer.stop_at=3")
    assert any(key.startswith("optimizer/") for key in saved_tensors(tmp_path / "new", 3))


def test_duplicated_experts_with_as_many_more_choices_compute_the_same(ckpt, moe_run, tmp_path):
    code, _, err = ckpt("experts", moe_run, tmp_path / "new", "--duplicate", "2", "gate.top_k=4")
    assert code == 0
    assert "4 -> 8" in err
    old, new = saved_tensors(moe_run, 4), saved_tensors(tmp_path / "new", 4)
    name = "model/blocks.1.mlp.experts.w_in"
    assert torch.equal(new[name], torch.cat([old[name], old[name]]))
    moment = "optimizer/blocks.1.mlp.gate.proj.weight/exp_avg"
    assert torch.equal(new[moment], torch.cat([old[moment], old[moment]]))
    evaluated = [moeflow("eval", str(folder), "--json").stdout for folder in (moe_run, tmp_path / "new")]
    one, other = (json.loads(text)["eval/loss"] for text in evaluated)
    assert other == pytest.approx(one, rel=1e-5)
    origin = json.loads((tmp_path / "new" / "origin.json").read_text())
    assert origin["operation"] == "experts" and origin["arguments"]["experts_after"] == 8
    assert "ckpt experts" in ckpt("ls", tmp_path / "new")[1]
    moeflow("resume", str(tmp_path / "new"), "trainer.stop_at=5")


def test_noise_spares_the_first_copy(ckpt, moe_run, tmp_path):
    assert ckpt("experts", moe_run, tmp_path / "new", "--duplicate", "3", "--noise", "0.1")[0] == 0
    old, new = saved_tensors(moe_run, 4), saved_tensors(tmp_path / "new", 4)
    for name in ("model/blocks.0.mlp.experts.w_out", "model/blocks.0.mlp.gate.proj.weight"):
        assert torch.equal(new[name][:4], old[name])
        share = (new[name][4:8] - old[name]).std() / old[name].std()
        assert 0.07 < share < 0.14, name
        assert not torch.equal(new[name][4:8], new[name][8:])


def test_experts_that_are_dropped_or_kept(ckpt, moe_run, tmp_path):
    assert ckpt("experts", moe_run, tmp_path / "dropped", "--drop", "1,2")[0] == 0
    assert ckpt("experts", moe_run, tmp_path / "kept", "--keep", "3,0")[0] == 0
    old = saved_tensors(moe_run, 4)
    for folder, chosen in (("dropped", [0, 3]), ("kept", [3, 0])):
        new = saved_tensors(tmp_path / folder, 4)
        for name in ("blocks.0.mlp.experts.w_in", "blocks.1.mlp.gate.proj.weight"):
            assert torch.equal(new[f"model/{name}"], old[f"model/{name}"][chosen])
            assert torch.equal(new[f"optimizer/{name}/exp_avg_sq"], old[f"optimizer/{name}/exp_avg_sq"][chosen])


def test_an_upcycled_model_computes_what_the_dense_one_did(ckpt, dense_run, tmp_path):
    assert ckpt("experts", dense_run, tmp_path / "new", "--upcycle", "4", "model.moe_every=1")[0] == 0
    evaluated = [moeflow("eval", str(folder), "--json").stdout for folder in (dense_run, tmp_path / "new")]
    one, other = (json.loads(text)["eval/loss"] for text in evaluated)
    assert other == pytest.approx(one, rel=1e-5)
    moeflow("resume", str(tmp_path / "new"), "trainer.stop_at=2")
    assert len(losses(tmp_path / "new")) == 2


def test_export_and_import(ckpt, moe_run, tmp_path):
    before = contents(moe_run)
    assert ckpt("export", moe_run, tmp_path / "hf")[:2] == (0, f"{tmp_path / 'hf'}: step 4 as mixtral, fp32\n")
    assert contents(moe_run) == before
    source = contents(tmp_path / "hf")
    assert ckpt("import", tmp_path / "hf", tmp_path / "run", *SMALL[:2], *SMALL[5:])[0] == 0
    assert contents(tmp_path / "hf") == source
    evaluated = [moeflow("eval", str(folder), "--json").stdout for folder in (moe_run, tmp_path / "run")]
    one, other = (json.loads(text)["eval/loss"] for text in evaluated)
    assert other == pytest.approx(one, rel=1e-5)
    moeflow("resume", str(tmp_path / "run"), "trainer.stop_at=1")


def test_what_cannot_be_done_leaves_no_folder(ckpt, moe_run, dense_run, tmp_path):
    new = tmp_path / "new"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for words, message in [
        (["reshard", moe_run, new, "parallel.ep=3", "launch.processes=3"], "parallel.ep=3"),
        (["reshard", moe_run, new, "model.d_model=64"], "model.d_model"),
        (["reshard", moe_run, new, "--step", "3"], "no checkpoint of step 3"),
        (["reshard", moe_run, tmp_path / "taken"], "taken"),
        (["reshard", moe_run], "2 folders"),
        (["experts", moe_run, new], "takes one of"),
        (["experts", moe_run, new, "--drop", "0,9"], "experts 0 to 3"),
        (["experts", moe_run, new, "--drop", "0,1,2,3"], "not among"),
        (["experts", moe_run, new, "--duplicate", "x"], "--duplicate x"),
        (["experts", moe_run, new, "--duplicate", "2", "--noise", "nan"], "--noise nan"),
        (["experts", moe_run, new, "--upcycle", "4"], "only a dense gpt"),
        (["experts", dense_run, new, "--duplicate", "2"], "not among"),
        (["experts", moe_run, new, "--duplicate", "2", "model.d_model=64"], "do not fit"),
        (["export", moe_run, new, "--family", "olmo"], "Did you mean 'olmoe'"),
        (["export", moe_run, new, "--family", "qwen3_moe"], "qk_norm"),
        (["export", moe_run, new, "--dtype", "fp8"], "--dtype fp8"),
        (["export", moe_run, tmp_path / "taken"], "there already"),
        (["import", tmp_path / "none", new], "no folder"),
        (["import", tmp_path / "taken", new, "data.source=synthetic"], "no Hugging Face folder"),
        (["lss", moe_run], "Did you mean 'ls'"),
        (["ls", tmp_path / "none"], "no run folder"),
        (["ls"], "1 folders"),
    ]:
        code, _, err = ckpt(*words)
        assert code == 2, words
        assert message in err, (words, err)
        assert not new.exists(), words
        assert [path.name for path in (tmp_path / "taken").iterdir()] == ["file"]
