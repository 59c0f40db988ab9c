from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from moeflow.errors import ConfigError
from moeflow.models.attention import KeyValueCache
from moeflow.models.mlp import DenseMLP
from moeflow.models.rotary import Rotary
from moeflow.models.transformer import GPT, expert_width, hidden_width
from moeflow.moe import MoELayer
from moeflow.schema import GPTConfig, NaiveGateConfig
from tests.models.gpts import VOCAB, gpt, on_meta, tokens, with_values


def loss_of(model: GPT, inputs: torch.Tensor) -> torch.Tensor:
    return model.task.loss(model(inputs[:, :-1]), {"targets": inputs[:, 1:]})


def gradients(model: GPT, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model, inputs).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# --- the parts -------------------------------------------------------------------------------------------------------


def test_rotation_by_complex_numbers():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float32)
    as_complex = torch.complex(x[..., :4], x[..., 4:]).to(torch.complex128)
    position = torch.arange(7, 12, dtype=torch.float64)[:, None]
    theta = 1000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    expected = as_complex * torch.exp(1j * position * theta)
    turned = Rotary(7, 1000.0)(x)
    torch.testing.assert_close(turned[..., :4].double(), expected.real, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(turned[..., 4:].double(), expected.imag, atol=1e-5, rtol=1e-5)


def test_attention_depends_on_distances_alone():
    """Rotary positions: the same tokens further on in the text give the same output."""
    attention = gpt().blocks["0"].attention
    x = torch.randn(1, 6, 32)
    near = attention(x, Rotary(0, 10000.0))
    far = attention(x, Rotary(100, 10000.0))
    torch.testing.assert_close(near, far, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_against_a_loop(kv_heads):
    attention = gpt(num_kv_heads=kv_heads, init_std=0.3).blocks["0"].attention
    x = torch.randn(2, 5, 32)
    rotary = Rotary(0, 10000.0)
    expected = torch.zeros(2, 5, 32)
    for b in range(2):
        for h in range(4):
            shared = h // (4 // kv_heads)
            q = rotary((x[b] @ attention.q.weight.T)[:, 8 * h : 8 * h + 8])
            k = rotary((x[b] @ attention.k.weight.T)[:, 8 * shared : 8 * shared + 8])
            v = (x[b] @ attention.v.weight.T)[:, 8 * shared : 8 * shared + 8]
            for s in range(5):
                weights = torch.softmax(q[s] @ k[: s + 1].T / math.sqrt(8), dim=0)
                expected[b, s, 8 * h : 8 * h + 8] = weights @ v[: s + 1]
    torch.testing.assert_close(attention(x, rotary), expected @ attention.out.weight.T, atol=1e-5, rtol=1e-5)


def test_a_token_never_sees_later_ones():
    model = gpt().eval()
    inputs = tokens()
    changed = inputs.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_heads_of_a_rank_add_up_to_the_whole():
    """Column-split q, k, v and row-split out, each with half of the heads, as tensor parallelism uses them."""
    whole = gpt().blocks["1"].attention
    x = torch.randn(2, 5, 32)
    rotary = Rotary(0, 10000.0)
    total = torch.zeros(2, 5, 32)
    for half in (slice(0, 16), slice(16, 32)):
        part = gpt().blocks["1"].attention
        for name in ("q", "k", "v"):
            getattr(part, name).weight = nn.Parameter(getattr(whole, name).weight[half])
        part.out.weight = nn.Parameter(whole.out.weight[:, half])
        total += part(x, rotary)
    torch.testing.assert_close(total, whole(x, rotary), atol=1e-6, rtol=1e-5)


# --- structure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_experts": 0}, []),
        ({}, [0, 1, 2, 3, 4]),
        ({"moe_every": 2, "moe_offset": 1}, [1, 3]),
        ({"moe_every": 2}, [0, 2, 4]),
        ({"moe_every": 3, "moe_offset": 2}, [2]),
    ],
)
def test_which_layers_have_experts(options, expected):
    model = gpt(num_layers=5, **options)
    assert list(model.blocks) == ["0", "1", "2", "3", "4"]
    kinds = [isinstance(block.mlp, MoELayer) for block in model.blocks.values()]
    assert [layer for layer, is_moe in enumerate(kinds) if is_moe] == expected
    assert all(isinstance(block.mlp, (MoELayer, DenseMLP)) for block in model.blocks.values())


def test_equal_active_size():
    """A token meets as many parameters in an MoE layer's experts as in a dense MLP."""
    config = GPTConfig(vocab_size=65)
    assert hidden_width(config) == 352  # 8/3 * 128 rounded up to a multiple of 16
    assert expert_width(config, 2) == 176
    dense = sum(p.numel() for p in GPT(GPTConfig(vocab_size=65, num_experts=0), NaiveGateConfig()).parameters())
    sparse = GPT(GPTConfig(vocab_size=65, num_experts=8), NaiveGateConfig(top_k=2))
    idle = sum(p.numel() * 6 // 8 for block in sparse.blocks.values() for p in block.mlp.experts.parameters())
    gates = sum(block.mlp.gate.proj.weight.numel() for block in sparse.blocks.values())
    assert sum(p.numel() for p in sparse.parameters()) - idle - gates == dense


def test_tied_embeddings_are_one_parameter():
    tied, untied = gpt(), gpt(tie_embeddings=False)
    assert tied.head.weight is tied.embed.weight
    assert "head.weight" not in dict(tied.named_parameters())
    assert "head.weight" in dict(untied.named_parameters())
    assert not torch.equal(untied.head.weight, untied.embed.weight)


def test_initial_values():
    model = gpt(d_model=128, num_layers=8, num_experts=0, tie_embeddings=False)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == 1).all(), name
        else:
            end_of_branch = name.endswith(("out.weight", "down.weight"))
            assert p.std().item() == pytest.approx(0.02 / 4 if end_of_branch else 0.02, rel=0.05), name
    experts = gpt(d_model=128, num_layers=8).blocks["3"].mlp.experts
    assert experts.w_in.std().item() == pytest.approx(0.02, rel=0.05)
    assert experts.w_out.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_initial_loss_is_that_of_guessing():
    assert loss_of(gpt(), tokens(8, 32)).item() == pytest.approx(math.log(VOCAB), abs=0.1)


# --- stages and parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tie", [True, False])
def test_stages_in_turn_are_the_whole(tie):
    """Each stage is built and given its values by itself, as on a rank of its own."""
    options = {"num_layers": 3, "tie_embeddings": tie}
    whole = gpt(**options)
    stages = []
    for kept in ([0], [1], [2]):
        stage = on_meta(whole.config)
        for layer in list(stage.blocks):
            if int(layer) not in kept:
                del stage.blocks[layer]
        if 0 not in kept:
            stage.embed = None
        if 2 not in kept:
            stage.norm = stage.head = None
        stages.append(with_values(stage))
    x = inputs = tokens()
    for stage in stages:
        x = stage(x)
    torch.testing.assert_close(x, whole(inputs), atol=0, rtol=0)
    names = {name for stage in stages for name, _ in stage.named_parameters()}
    assert names - {"head.weight"} == {name for name, _ in whole.named_parameters()} - {"head.weight"}


# --- activation checkpointing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [{}, {"load_balance_scope": "batch", "z_loss_coef": 0.01}])
def test_recomputing_activations_changes_no_gradient(gate):
    """A large balance loss: counted twice, or not at all, it would show."""
    gate = {"load_balance_coef": 1.0, **gate}
    plain = gradients(gpt(gate), tokens())
    recomputed = gradients(gpt(gate, activation_checkpointing=True), tokens())
    without = gradients(gpt({**gate, "load_balance_coef": 0.0}), tokens())
    for name, grad in plain.items():
        torch.testing.assert_close(recomputed[name], grad, atol=0, rtol=0)
    name = "blocks.0.mlp.gate.proj.weight"
    assert (plain[name] - without[name]).norm() > 0.1 * plain[name].norm()


def test_recomputing_repeats_dropout():
    torch.manual_seed(3)
    plain = gradients(gpt(dropout=0.2), tokens())
    torch.manual_seed(3)
    recomputed = gradients(gpt(dropout=0.2, activation_checkpointing=True), tokens())
    for name, grad in plain.items():
        torch.testing.assert_close(recomputed[name], grad, atol=0, rtol=0)


def test_recomputing_runs_blocks_again_but_records_once():
    model = gpt(activation_checkpointing=True)
    layer = model.blocks["0"].mlp
    calls = []
    layer.gate.register_forward_hook(lambda *_: calls.append(1))
    first = loss_of(model, tokens(seed=1))
    loss_of(model, tokens(seed=2))  # as in a pipeline: another micro-batch goes forward before the first comes back
    stats = layer.last_stats
    first.backward()
    assert len(calls) == 3, "the block must have been computed again"
    assert layer.last_stats is stats


def test_checkpointing_keeps_less():
    """Bytes that the graph holds on to, counted by torch's own hooks."""

    def saved(model: GPT) -> int:
        seen: dict[int, int] = {}

        def pack(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss_of(model, tokens(8, 64))
        return sum(seen.values())

    assert saved(gpt(num_layers=4, activation_checkpointing=True)) < 0.5 * saved(gpt(num_layers=4))


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_bf16_autocast(recompute):
    inputs = tokens(4, 32)
    exact = loss_of(gpt(), inputs)
    model = gpt(activation_checkpointing=recompute)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(inputs[:, :-1])
        loss = model.task.loss(logits, {"targets": inputs[:, 1:]})
    loss.backward()
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-2)
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32, name
        assert p.grad.isfinite().all(), name


def test_evaluation_inside_inference_mode_leaves_training_possible():
    model = gpt()
    with torch.inference_mode():
        model(tokens())
    loss_of(model, tokens()).backward()


# --- task ------------------------------------------------------------------------------------------------------------


def test_task_counts_tokens_and_masks_sequences():
    model = gpt()
    logits, targets = torch.randn(3, 5, VOCAB), tokens(3, 5)
    probs = torch.softmax(logits.double(), dim=-1)
    nll = torch.tensor([[-math.log(probs[b, s, targets[b, s]]) for s in range(5)] for b in range(3)])
    assert model.task.loss(logits, {"targets": targets}).item() == pytest.approx(nll.mean().item(), rel=1e-5)
    total, count = model.task.metrics(logits, {"targets": targets})["loss"]
    assert (total.item(), int(count)) == (pytest.approx(nll.sum().item(), rel=1e-5), 15)
    batch = {"targets": targets, "valid": torch.tensor([True, False, True])}
    total, count = model.task.metrics(logits, batch)["loss"]
    assert (total.item(), int(count)) == (pytest.approx(nll[[0, 2]].sum().item(), rel=1e-5), 10)
    assert model.task.derived({"loss": 2.0}) == {"perplexity": pytest.approx(7.389056, rel=1e-6)}
    assert model.task.num_units({"targets": targets}) == 15


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"vocab_size": None}, "model.vocab_size"),
        ({"d_model": 36}, "model.d_model"),
        ({"num_kv_heads": 3}, "model.num_kv_heads"),
        ({"moe_every": 2, "moe_offset": 2}, "model.moe_offset"),
    ],
)
def test_impossible_options(options, key):
    with pytest.raises(ConfigError, match=key) as caught:
        gpt(**options)
    assert caught.value.mend


@pytest.mark.parametrize("name", ["expert_choice", "soft"])
def test_gates_that_look_ahead_are_refused(name):
    with pytest.raises(ConfigError, match=f"gate={name}"):
        gpt({"name": name, "load_balance_scope": "batch"})
    gpt({"name": name, "load_balance_scope": "batch"}, num_experts=0)


def test_the_hash_gate_routes_by_tokens():
    model = gpt({"name": "hash"}).eval()
    routed = []
    model.blocks["1"].mlp.gate.register_forward_hook(lambda _m, _args, out: routed.append(out.ids_TK))
    inputs = tokens(2, 20)
    model(inputs)
    by_token = {}
    for token, ids in zip(inputs.flatten().tolist(), routed[0].tolist(), strict=True):
        assert by_token.setdefault(token, ids) == ids
    assert {ids[0] for ids in by_token.values()} == {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="gate=hash"):
        model.run(torch.randn(2, 20, 32), ["1"])  # a later pipeline stage


# --- against Hugging Face --------------------------------------------------------------------------------------------


def hf_names(layer: int) -> dict[str, str]:
    ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
    return {
        f"{ours}.attention_norm.weight": f"{theirs}.input_layernorm.weight",
        f"{ours}.attention.q.weight": f"{theirs}.self_attn.q_proj.weight",
        f"{ours}.attention.k.weight": f"{theirs}.self_attn.k_proj.weight",
        f"{ours}.attention.v.weight": f"{theirs}.self_attn.v_proj.weight",
        f"{ours}.attention.out.weight": f"{theirs}.self_attn.o_proj.weight",
        f"{ours}.mlp_norm.weight": f"{theirs}.post_attention_layernorm.weight",
        f"{ours}.mlp.gate.weight": f"{theirs}.mlp.gate_proj.weight",
        f"{ours}.mlp.up.weight": f"{theirs}.mlp.up_proj.weight",
        f"{ours}.mlp.down.weight": f"{theirs}.mlp.down_proj.weight",
        f"{ours}.mlp.gate.proj.weight": f"{theirs}.mlp.gate.weight",
        f"{ours}.mlp.experts.w_in": f"{theirs}.mlp.experts.gate_up_proj",
        f"{ours}.mlp.experts.w_out": f"{theirs}.mlp.experts.down_proj",
    }


@torch.no_grad()
def copy_from(model: GPT, source: nn.Module) -> None:
    names = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    names["head.weight"] = "lm_head.weight"
    for layer in model.blocks:
        names |= hf_names(int(layer))
    values = source.state_dict()
    for name, p in model.named_parameters():
        p.copy_(values[names[name]].view_as(p))


@pytest.mark.parametrize("kind", ["Llama", "Mixtral"])
@pytest.mark.parametrize(("kv_heads", "tie"), [(4, False), (2, True)])
def test_logits_and_gradients_of_hugging_face(kind, kv_heads, tie):
    transformers = pytest.importorskip("transformers")
    options = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tie,
        "initializer_range": 0.2,
    }
    if kind == "Mixtral":
        options |= {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**options)).float()
    ours = gpt(
        {"top_k": 2, "load_balance_coef": 0.0},
        num_layers=3,
        num_kv_heads=kv_heads,
        d_hidden=24,
        expert_hidden=24,
        num_experts=5 if kind == "Mixtral" else 0,
        norm_eps=1e-6,
        tie_embeddings=tie,
        rope_theta=theirs.config.rope_parameters["rope_theta"],
    )
    copy_from(ours, theirs)
    inputs = tokens(2, 40)
    expected, logits = theirs(inputs).logits, ours(inputs)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    def token_loss(out):
        return functional.cross_entropy(out[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())

    token_loss(expected).backward()
    token_loss(logits).backward()
    theirs_grads = {name: p.grad for name, p in theirs.named_parameters()}
    for layer in range(3):
        for mine, other in hf_names(layer).items():
            if mine in dict(ours.named_parameters()):
                grad = ours.get_parameter(mine).grad
                torch.testing.assert_close(grad, theirs_grads[other].view_as(grad), atol=1e-5, rtol=1e-4)


def test_cached_forward_in_pieces():
    model = gpt().eval()
    inputs = tokens(2, 11)
    cache = KeyValueCache(16)
    pieces = [model(inputs[:, a:b], cache) for a, b in ((0, 4), (4, 5), (5, 9), (9, 11))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(inputs), atol=1e-5, rtol=1e-5)
    assert cache.length == 11
