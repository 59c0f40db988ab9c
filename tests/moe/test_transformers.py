"""MoELayer against the MoE blocks of Transformers, with copied weights: output and all gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moeflow.moe import DenseMLP, MoELayer, SharedExperts
from moeflow.moe.gates import after_step
from moeflow.schema.gate import AuxFreeGateConfig, NaiveGateConfig

pytest.importorskip("transformers", reason="Transformers is the oracle here: pip install 'moeflow[hf]'")

D, F, E, K, SHARED = 12, 10, 8, 3, 14


def mixtral() -> tuple[nn.Module, NaiveGateConfig]:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    config = MixtralConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=K)
    return MixtralSparseMoeBlock(config), NaiveGateConfig(top_k=K)


def qwen2(normalize: bool = False) -> tuple[nn.Module, NaiveGateConfig]:
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeSparseMoeBlock

    config = Qwen2MoeConfig(
        hidden_size=D, moe_intermediate_size=F, shared_expert_intermediate_size=SHARED, num_experts=E,
        num_experts_per_tok=K, norm_topk_prob=normalize,
    )  # fmt: skip
    return Qwen2MoeSparseMoeBlock(config), NaiveGateConfig(top_k=K, renormalize="before" if normalize else "none")


def qwen3() -> tuple[nn.Module, NaiveGateConfig]:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K, norm_topk_prob=True
    )
    return Qwen3MoeSparseMoeBlock(config), NaiveGateConfig(top_k=K)


def olmoe() -> tuple[nn.Module, NaiveGateConfig]:
    from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeSparseMoeBlock

    config = OlmoeConfig(hidden_size=D, intermediate_size=F, num_experts=E, num_experts_per_tok=K, norm_topk_prob=False)
    return OlmoeSparseMoeBlock(config), NaiveGateConfig(top_k=K, renormalize="none")


def deepseek_v3() -> tuple[nn.Module, AuxFreeGateConfig]:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=D, moe_intermediate_size=F, n_routed_experts=E, num_experts_per_tok=K, n_shared_experts=2,
        n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    return DeepseekV3MoE(config), AuxFreeGateConfig(top_k=K, num_groups=4, top_groups=2, group_score_k=2, scaling=2.5)


BLOCKS = {
    "Mixtral": mixtral,
    "Qwen2-MoE": qwen2,
    "Qwen2-MoE, normalized": lambda: qwen2(True),
    "Qwen3-MoE": qwen3,
    "OLMoE": olmoe,
    "DeepSeek-V3": deepseek_v3,
}


def stacked_halves(weight: Tensor) -> Tensor:
    return weight.view(E, 2, F, D)


def shared_mlp(block: nn.Module) -> nn.Module | None:
    return getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)


def build(name: str) -> tuple[nn.Module, MoELayer, dict[str, tuple[Tensor, Tensor]]]:
    """The block, a layer with its weights, and pairs (their parameter, the view of it that ours must equal)."""
    torch.manual_seed(len(name))
    block, gate = BLOCKS[name]()
    gate.load_balance_coef = 0.0
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    shared = None
    if (theirs := shared_mlp(block)) is not None:
        width = theirs.gate_proj.weight.shape[0]
        shared = SharedExperts(
            DenseMLP(D, width, D, "swiglu", bias=False), D, gated=hasattr(block, "shared_expert_gate")
        )
    layer = MoELayer(D, E, F, gate, "swiglu", bias=False, shared=shared)
    pairs = {
        "gate": (layer.gate.proj.weight, block.gate.weight),
        "w_in": (layer.experts.w_in, stacked_halves(block.experts.gate_up_proj)),
        "w_out": (layer.experts.w_out, block.experts.down_proj),
    }
    if shared is not None:
        pairs["shared in"] = (shared.mlp.fc_in.weight, torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight]))
        pairs["shared out"] = (shared.mlp.fc_out.weight, theirs.down_proj.weight)
        if shared.gate is not None:
            pairs["shared gate"] = (shared.gate.weight, block.shared_expert_gate.weight)
    with torch.no_grad():
        for ours, theirs in pairs.values():
            ours.copy_(theirs)
        if name == "DeepSeek-V3":
            bias = torch.randn(E) / 4
            block.gate.e_score_correction_bias.copy_(bias)
            layer.gate.selection_bias_E.copy_(bias)
    return block, layer, pairs


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("name", BLOCKS)
def test_output_and_gradients(name: str, num_tokens: int):
    block, layer, pairs = build(name)
    x = torch.randn(2, num_tokens, D)
    upstream = torch.randn(2, num_tokens, D)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = layer(ours), block(theirs)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    y.backward(upstream)
    # Gradients by the pairs' views, whose graph leads to the block's parameters.
    expected.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    for key, (mine, _) in pairs.items():
        torch.testing.assert_close(
            mine.grad, grad_of(block, key), rtol=1e-5, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


def grad_of(block: nn.Module, key: str) -> Tensor:
    shared = shared_mlp(block)
    return {
        "gate": lambda: block.gate.weight.grad,
        "w_in": lambda: stacked_halves(block.experts.gate_up_proj.grad),
        "w_out": lambda: block.experts.down_proj.grad,
        "shared in": lambda: torch.cat([shared.gate_proj.weight.grad, shared.up_proj.weight.grad]),
        "shared out": lambda: shared.down_proj.weight.grad,
        "shared gate": lambda: block.shared_expert_gate.weight.grad,
    }[key]()


def test_load_balance_loss_is_k_times_smaller():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layer = MoELayer(D, E, F, NaiveGateConfig(top_k=K))
    x = torch.randn(3, 20, D)
    layer(x)
    logits = layer.gate.logits(x.view(60, D))
    theirs = load_balancing_loss_func((logits,), E, K)
    torch.testing.assert_close(K * layer.last_stats.losses["load_balance"], theirs)
    mask = torch.ones(3, 20)
    mask[1, 13:] = 0
    layer(x, mask=mask == 0)
    torch.testing.assert_close(
        K * layer.last_stats.losses["load_balance"], load_balancing_loss_func((logits,), E, K, mask)
    )


def test_bias_after_a_step_still_agrees():
    block, layer, _ = build("DeepSeek-V3")
    x = torch.randn(1, 30, D)
    layer(x)
    after_step(layer, lambda counts: counts)
    block.gate.e_score_correction_bias.copy_(layer.gate.selection_bias_E)
    torch.testing.assert_close(layer(x), block(x), rtol=1e-5, atol=1e-5)
