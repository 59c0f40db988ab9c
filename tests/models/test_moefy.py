"""Dense models made into MoE models: what is found, equality at the start, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from moeflow import MoELayer, moefy
from moeflow.errors import ConfigError
from moeflow.schema import NaiveGateConfig

OPT = {"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "word_embed_proj_dim": 16}
T5 = {"d_model": 16, "d_ff": 24, "num_layers": 3, "num_heads": 2, "d_kv": 8}
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 50}


def config_of(name: str):
    t = transformers
    return {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, num_key_value_heads=2)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**SMALL, num_key_value_heads=2)),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SMALL)),
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=50, n_inner=24)),
        "opt": lambda: t.OPTForCausalLM(t.OPTConfig(**OPT, vocab_size=50)),
        "bert": lambda: t.BertModel(t.BertConfig(**SMALL)),
        "t5": lambda: t.T5EncoderModel(t.T5Config(**T5, vocab_size=50)),
    }[name]()  # fmt: skip


def outputs(model, ids):
    out = model(ids)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_neox", "gpt2", "opt", "bert", "t5"])
def test_an_upcycled_model_of_transformers_maps_as_before(name):
    model = config_of(name).eval()
    ids = torch.randint(0, 50, (2, 7))
    with torch.no_grad():
        before = outputs(model, ids)
        moefy(model, 4)
        after = outputs(model, ids)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    assert len(layers) == 3 and all(layer.num_experts == 4 for layer in layers)
    outputs(model.train(), ids).float().square().mean().backward()
    for layer in layers:
        assert layer.experts.w_in.grad.norm() > 0 and all(p.grad is not None for p in layer.gate.parameters())
    restored = moefy(config_of(name), 4)
    restored.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(outputs(restored.eval(), ids), outputs(model.eval(), ids))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_torch_transformer_encoder(activation, norm_first):
    layer = nn.TransformerEncoderLayer(16, 2, 24, activation=activation, norm_first=norm_first, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    x, padding = torch.randn(3, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
    with torch.no_grad():
        before = model(x)
        before_padded = model.layers[0](x, src_key_padding_mask=padding)
        moefy(model, 4)
        torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
        after = model.layers[0](x, src_key_padding_mask=padding)
    torch.testing.assert_close(after[~padding], before_padded[~padding], rtol=1e-5, atol=1e-5)
    assert sum(isinstance(module, MoELayer) for module in model.modules()) == 2


class Block(nn.Module):
    """A residual MLP with a name of its own."""

    def __init__(self, width: int = 8, hidden: int = 12):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width), nn.Dropout(0.5))

    def forward(self, x):
        return x + self.mlp(x)


def test_which_layers():
    model = nn.Sequential(*(Block() for _ in range(6)))
    moefy(model, 2, every=3, offset=1)
    assert [any(isinstance(m, MoELayer) for m in block.modules()) for block in model] == [False, True, False] * 2
    moefy(model, 2, where="5.*")
    assert isinstance(model[5].mlp[0], MoELayer)
    assert not any(isinstance(m, MoELayer) for m in model[0].modules())
    moefy(model, 2, where=lambda name, module: name.startswith("0"))
    assert isinstance(model[0].mlp[0], MoELayer)


def test_dropout_behind_an_mlp_stays():
    model = moefy(nn.Sequential(Block()), 2)
    assert isinstance(model[0].mlp[1], nn.Dropout) and model[0].mlp[1].p == 0.5


def test_experts_of_another_width_are_drawn_anew():
    model = nn.Sequential(Block(), Block())
    moefy(model, 8, init="random", d_hidden=4, gate=NaiveGateConfig(top_k=1))
    assert model[0].mlp[0].experts.d_hidden == 4 and model[0].mlp[0].gate.config.top_k == 1
    assert model[0].mlp[0].gate is not model[1].mlp[0].gate
    assert model[0].mlp[0].gate.config is not model[1].mlp[0].gate.config


def test_noise_tells_the_experts_apart():
    model = nn.Sequential(Block())
    dense = model[0].mlp[0].weight.detach().clone()
    experts = moefy(model, 4, noise=0.1)[0].mlp[0].experts
    spread = (experts.w_in - dense).std() / dense.std()
    assert 0.07 < spread < 0.13
    assert not torch.equal(experts.w_in[0], experts.w_in[1])
    assert torch.equal(experts.b_in[0], experts.b_in[1])


def test_dtype_device_and_mode_are_kept():
    model = moefy(nn.Sequential(Block()).to(torch.bfloat16).eval(), 2)
    layer = model[0].mlp[0]
    assert layer.experts.w_in.dtype == torch.bfloat16 and not layer.training
    with torch.device("meta"):
        model = nn.Sequential(Block())
    assert moefy(model, 2)[0].mlp[0].experts.w_in.is_meta


class Normed(nn.Module):
    """Looks like an MLP, but divides by the norm."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)

    def forward(self, x):
        return nn.functional.normalize(self.down(self.act(self.up(x))), dim=-1)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (lambda: nn.ModuleDict({"a": Normed()}), {}, "computes more than its linear maps and relu"),
        (lambda: nn.ModuleDict({"a": nn.Linear(4, 4)}), {}, "ModuleDict has no MLP"),
        (lambda: Block(), {"where": "*.nothing"}, r"where='\*.nothing' matches none of the MLPs of Block: mlp"),
        (lambda: Block(), {"d_hidden": 5}, "d_hidden=5: experts that are copies of mlp have its hidden width, 12"),
        (lambda: Block(), {"init": "zeros"}, "init='zeros'"),
        (lambda: Block(), {"every": 2, "offset": 1}, "takes none of the 1 MLPs"),
        (lambda: Block(), {"every": 0}, "0 <= offset < every"),
        (lambda: Block(), {"num_experts": 0}, "num_experts=0"),
        (lambda: Block(), {"gate": "nave"}, "nave"),
        (
            lambda: nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))}),
            {},
            "must have one activation of relu, gelu, gelu_tanh or silu, and has none",
        ),
    ],
)
def test_what_is_refused_leaves_the_model_alone(module, options, message):
    model = module()
    before = {name: type(m) for name, m in model.named_modules()}
    with pytest.raises(ConfigError, match=message):
        moefy(model, **{"num_experts": 4, **options})
    assert {name: type(m) for name, m in model.named_modules()} == before


def test_moe_layers_are_left_alone():
    model = moefy(nn.Sequential(Block()), 2)
    with pytest.raises(ConfigError, match="has no MLP"):
        moefy(model, 2)
