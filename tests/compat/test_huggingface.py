"""Models of Transformers to ours and back: the same logits, and the same tensors to the last bit."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeflow.compat.huggingface.families import FAMILIES, choose_family, read_config
from moeflow.compat.huggingface.folder import load_folder, save_folder
from moeflow.errors import CheckpointError
from moeflow.models.transformer import GPT
from moeflow.schema import GATES, GPTConfig
from tests.models.gpts import VOCAB, gpt, tokens

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 8, "moe_intermediate_size": 12, "n_shared_experts": 2, "kv_lora_rank": 12, "q_lora_rank": 14,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10, "first_k_dense_replace": 1, "n_group": 4,
    "topk_group": 2, "num_key_value_heads": 4, "routed_scaling_factor": 2.5,
}  # fmt: skip
THEIRS = {
    "llama": ("Llama", {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "mixtral, tied, wide heads": ("Mixtral", {"num_local_experts": 5, "tie_word_embeddings": True, "head_dim": 12}),
    "olmoe": ("Olmoe", {"num_experts": 5}),
    "qwen2_moe": ("Qwen2Moe", {"num_experts": 5, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 14}),
    "qwen2_moe, every second": (
        "Qwen2Moe",
        {"num_experts": 5, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 14, "norm_topk_prob": True,
         "decoder_sparse_step": 2, "qkv_bias": False},
    ),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 5, "moe_intermediate_size": 12, "head_dim": 12, "mlp_only_layers": [0]}),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3, direct queries": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
}  # fmt: skip


def theirs(kind: str, options: dict) -> torch.nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **options})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or name.endswith("bias"):
                # Ones and zeros would hide a mistake.
                value.add_(torch.randn_like(value) * 0.3)
    return model


@torch.no_grad()
def ours(folder: Path) -> torch.nn.Module:
    config, gate, tensors = load_folder(folder)
    model = GPT(config, gate).eval()
    left = model.load_state_dict(tensors, strict=False)
    assert not left.unexpected_keys
    assert set(left.missing_keys) <= {"head.weight"} if config.tie_embeddings else not left.missing_keys
    return model


def files(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def assert_same(one: dict, other: dict):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("name", list(THEIRS))
@torch.no_grad()
def test_their_model_here_and_back(name, tmp_path):
    kind, options = THEIRS[name]
    source = theirs(kind, options)
    source.save_pretrained(tmp_path / "theirs")
    inputs = tokens(2, 40)
    expected = source(inputs).logits
    assert expected.std() > 0.1
    model = ours(tmp_path / "theirs")
    torch.testing.assert_close(model(inputs), expected, atol=1e-5, rtol=1e-5)

    state = {k: v for k, v in model.state_dict().items() if k != "head.weight" or not model.config.tie_embeddings}
    gate = next((b.mlp.gate.config for b in model.blocks.values() if hasattr(b.mlp, "experts")), GATES["naive"]())
    assert save_folder(tmp_path / "back", state, model.config, gate, None, "fp32") == name.partition(",")[0]
    assert_same(files(tmp_path / "theirs"), files(tmp_path / "back"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").float().eval()
    torch.testing.assert_close(again(inputs).logits, expected, atol=1e-6, rtol=1e-6)
    assert_same(source.state_dict(), again.state_dict())


OURS = {
    "llama": ({}, {"num_experts": 0, "num_kv_heads": 2, "tie_embeddings": False}),
    "mixtral": ({"scaling": 2.0}, {"num_kv_heads": 2, "head_dim": 6}),
    "olmoe": ({"renormalize": "none", "name": "switch", "capacity_factor": None, "eval_capacity_factor": None},
              {"qk_norm": "all"}),
    "qwen2_moe": ({"scaling": 1.3}, {"shared_hidden": 10, "shared_gate": True, "moe_every": 2, "moe_offset": 1}),
    "qwen3_moe": ({"top_k": 3}, {"qk_norm": "head", "first_dense": 1}),
    "deepseek_v3": (
        {"name": "aux_free", "num_groups": 2, "top_groups": 1, "scaling": 1.5},
        {"attention": "mla", "mla_q_rank": 6, "shared_hidden": 96, "first_dense": 1, "num_layers": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(OURS))
@torch.no_grad()
def test_our_model_there_and_back(name, tmp_path):
    gate, options = OURS[name]
    model = gpt(gate, seed=5, init_std=0.2, **options).eval()
    for layer, block in model.blocks.items():
        if hasattr(getattr(block.mlp, "gate", None), "selection_bias_E"):
            block.mlp.gate.selection_bias_E += torch.randn(4, generator=torch.Generator().manual_seed(int(layer)))
    state = {k: v for k, v in model.state_dict().items() if k != "head.weight" or not model.config.tie_embeddings}
    gate = next((b.mlp.gate.config for b in model.blocks.values() if hasattr(b.mlp, "experts")), GATES["naive"]())
    assert save_folder(tmp_path / "out", state, model.config, gate, None, "fp32") == name
    inputs = tokens(2, 30)
    expected = model(inputs)
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").float().eval()
    torch.testing.assert_close(there(inputs).logits, expected, atol=1e-5, rtol=1e-5)
    again = ours(tmp_path / "out")
    torch.testing.assert_close(again(inputs), expected, atol=1e-5, rtol=1e-5)
    if gate.scaling == 1.0 or name == "deepseek_v3":
        assert_same(model.state_dict(), again.state_dict())


def test_parts_with_an_index_and_half_precision(tmp_path, monkeypatch):
    from moeflow.compat.huggingface import folder

    write = folder._write_tensors
    monkeypatch.setattr(folder, "_write_tensors", lambda path, tensors: write(path, tensors, 4000))
    model = gpt(num_kv_heads=2)
    state = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    save_folder(tmp_path / "out", state, model.config, GATES["naive"](), "mixtral", "bf16")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 5
    _, _, tensors = load_folder(tmp_path / "out")
    assert tensors.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(tensors[name], value.bfloat16().float()), name
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(there.state_dict()["model.embed_tokens.weight"].float(), tensors["embed.weight"])


@pytest.mark.parametrize(
    ("gate", "options", "message"),
    [
        ({"name": "hash"}, {}, "gate=hash"),
        ({"capacity_factor": 1.0}, {}, "capacity_factor"),
        ({}, {"shared_hidden": 8}, "shared"),
        ({}, {"moe_every": 2}, "moe_every"),
        ({"bias": True}, {}, r"gate\.bias"),
        ({"name": "aux_free"}, {"attention": "mla"}, "shared_hidden"),
        ({}, {"qkv_bias": True}, "qkv_bias"),
    ],
)
def test_what_no_family_can_express_is_named(gate, options, message):
    config = GPTConfig(vocab_size=VOCAB, num_experts=4, **options)
    with pytest.raises(CheckpointError, match=message):
        choose_family(config, GATES[gate.pop("name", "naive")](**gate))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtrall"}, "Did you mean 'mixtral'"),
        ({"model_type": None}, "not known"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "yarn"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_size": "MISSING"}, "hidden_size"),
    ],
)
def test_what_our_model_has_not_is_named(change, message):
    source = {"model_type": "mixtral", "max_position_embeddings": 64, "num_local_experts": 4, **BASE, **change}
    source = {key: value for key, value in source.items() if value != "MISSING"}
    with pytest.raises(CheckpointError, match=message):
        read_config(source)


def test_tensors_that_are_missing_or_left_over_are_named(tmp_path):
    model = gpt()
    state = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    save_folder(tmp_path / "out", state, model.config, GATES["naive"](), None, "fp32")
    (path,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(path)
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, path)
    with pytest.raises(CheckpointError, match="no place"):
        load_folder(tmp_path / "out")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"experts\.2\.w3\.weight' is missing"):
        load_folder(tmp_path / "out")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="damaged"):
        load_folder(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("[1, 2")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        load_folder(tmp_path / "out")


def test_nothing_is_overwritten(tmp_path):
    model = gpt()
    state = {k: v for k, v in model.state_dict().items() if k != "head.weight"}
    with pytest.raises(CheckpointError, match="there already"):
        save_folder(tmp_path, state, model.config, GATES["naive"](), None, "fp32")
    assert not list(tmp_path.iterdir())


def test_every_family_is_under_test():
    assert {name.partition(",")[0] for name in THEIRS} == set(FAMILIES) == set(OURS)
