"""Gates: which experts a token goes to, and with what weight.  One class an option of the `gate` group.

docs/gates.md gives the formulas, their sources, and where other libraries differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from moeflow.schema.fields import option


@dataclass(slots=True)
class GateConfig:
    """What every gate has.  `name` picks the class in `moeflow.moe.gates`."""

    name: str = option("naive", "gate class")
    top_k: int = option(2, "experts per token", minimum=1)
    capacity_factor: Optional[float] = option(
        None,
        "tokens an expert takes = ceil(factor * top_k * tokens / num_experts); null drops nothing (dropless)",
        above=0.0,
    )
    eval_capacity_factor: Optional[float] = option(None, "the same in evaluation; null means as in training", above=0.0)
    min_capacity: int = option(0, "tokens an expert takes at least", minimum=0)
    drop_policy: str = option(
        "position", "who is kept when an expert is full", choices=("position", "probability", "random")
    )
    pad_to_capacity: bool = option(False, "give every expert exactly its capacity of rows, so that shapes are static")
    score: str = option("softmax", "from logits to scores", choices=("softmax", "sigmoid"))
    renormalize: str = option(
        "before",
        "let a token's weights sum to one: before choices are dropped, after (over what is kept), or not at all",
        choices=("before", "after", "none"),
    )
    scaling: float = option(1.0, "factor on the weights, after they are normalized", above=0.0)
    load_balance_coef: float = option(0.01, "weight of the load-balance loss E * sum_e f_e P_e", minimum=0.0)
    load_balance_scope: str = option(
        "batch",
        "over what f and P are taken: the micro-batch on all data ranks, each sequence by itself, or f over all "
        "micro-batches since the last optimizer step",
        choices=("batch", "sequence", "global"),
    )
    z_loss_coef: float = option(0.0, "weight of mean(logsumexp(logits)^2)", minimum=0.0)
    fp32: bool = option(True, "compute the gate in fp32 whatever the precision")
    bias: bool = option(False, "a bias on the gate's linear layer")
    frozen: bool = option(False, "keep the gate's parameters as they were drawn")


@dataclass(slots=True)
class NaiveGateConfig(GateConfig):
    """Plain top-k of the logits; weights are a softmax over the chosen ones."""

    name: str = option("naive", "gate class")


@dataclass(slots=True)
class NoisyGateConfig(GateConfig):
    """Noisy top-k (Shazeer et al. 2017, arXiv:1701.06538, section 4 and appendix A) with importance and load losses."""

    name: str = option("noisy", "gate class")
    load_balance_coef: float = option(0.0, "weight of E * sum_e f_e P_e", minimum=0.0)
    importance_coef: float = option(0.01, "weight of CV^2 of the experts' summed weights", minimum=0.0)
    load_coef: float = option(0.01, "weight of CV^2 of the smooth load estimate", minimum=0.0)


@dataclass(slots=True)
class SwitchGateConfig(GateConfig):
    """Switch (Fedus et al. 2021, arXiv:2101.03961): one expert, weight p, multiplicative jitter, capacity."""

    name: str = option("switch", "gate class")
    top_k: int = option(1, "experts per token", minimum=1)
    capacity_factor: Optional[float] = option(1.25, "see naive", above=0.0)
    eval_capacity_factor: Optional[float] = option(2.0, "see naive", above=0.0)
    renormalize: str = option("none", "see naive", choices=("before", "after", "none"))
    jitter: float = option(0.01, "training inputs of the gate are scaled by U(1-jitter, 1+jitter)", minimum=0.0)


@dataclass(slots=True)
class GShardGateConfig(GateConfig):
    """GShard (Lepikhin et al. 2020, arXiv:2006.16668, algorithm 1): top-2, the second expert taken by chance."""

    name: str = option("gshard", "gate class")
    top_k: int = option(2, "experts per token", minimum=2, maximum=2)
    capacity_factor: Optional[float] = option(1.2, "see naive", above=0.0)
    eval_capacity_factor: Optional[float] = option(2.4, "see naive", above=0.0)
    random_second: bool = option(True, "keep the second expert with probability min(1, 2 * its weight) in training")


@dataclass(slots=True)
class SwipeGateConfig(GateConfig):
    """SWIPE (BaGuaLu, PPoPP 2022): choices beyond an expert's even share move to experts with room; none is dropped."""

    name: str = option("swipe", "gate class")
    load_balance_coef: float = option(0.0, "weight of E * sum_e f_e P_e", minimum=0.0)


@dataclass(slots=True)
class ZeroGateConfig(GateConfig):
    """The first top_k experts for every token, with equal weights: to time the rest of a layer."""

    name: str = option("zero", "gate class")
    load_balance_coef: float = option(0.0, "has no effect: there are no probabilities", minimum=0.0)


@dataclass(slots=True)
class CosineGateConfig(GateConfig):
    """Cosine router (Chi et al. 2022, arXiv:2204.09179; Tutel's): cosines to expert embeddings, learned temperature."""

    name: str = option("cosine", "gate class")
    projection_dim: int = option(256, "dimension in which tokens and experts are compared", minimum=1)
    init_temperature: float = option(0.5, "temperature at the start", above=0.0)
    min_temperature: float = option(0.01, "bound below the learned temperature", above=0.0)


@dataclass(slots=True)
class TopologyGateConfig(GateConfig):
    """Topology-aware (FasterMoE, PPoPP 2022): at most a share of a rank's choices leaves its node."""

    name: str = option("topology", "gate class")
    outgoing_share: Optional[float] = option(
        None,
        "largest share of the choices that may leave the node; null lets the cost model say",
        minimum=0.0,
        maximum=1.0,
    )


@dataclass(slots=True)
class ExpertChoiceGateConfig(GateConfig):
    """Expert choice (Zhou et al. 2022, arXiv:2202.09368): each expert picks its capacity of tokens."""

    name: str = option("expert_choice", "gate class")
    capacity_factor: Optional[float] = option(
        1.0, "tokens that an expert picks = ceil(factor * top_k * tokens / num_experts)", above=0.0
    )
    renormalize: str = option("none", "see naive", choices=("before", "after", "none"))
    load_balance_coef: float = option(0.0, "has no use: the load is even by construction", minimum=0.0)
    pool: str = option(
        "batch", "tokens an expert picks from: this rank's micro-batch, or each sequence", choices=("batch", "sequence")
    )


@dataclass(slots=True)
class SinkhornGateConfig(GateConfig):
    """Sinkhorn (BASE layers, arXiv:2103.16716; Megatron-LM's): balanced assignment in training, top-k in evaluation."""

    name: str = option("sinkhorn", "gate class")
    top_k: int = option(1, "experts per token", minimum=1)
    load_balance_coef: float = option(0.0, "weight of E * sum_e f_e P_e", minimum=0.0)
    tolerance: float = option(1e-4, "stop when the mean change of the column scale is below", above=0.0)
    max_iterations: int = option(100, "iterations at most", minimum=1)


@dataclass(slots=True)
class HashGateConfig(GateConfig):
    """Hash layers (Roller et al. 2021, arXiv:2106.04426): experts by the token's id, or its position without ids."""

    name: str = option("hash", "gate class")
    top_k: int = option(1, "experts per token", minimum=1)
    load_balance_coef: float = option(0.0, "has no effect: there are no probabilities", minimum=0.0)
    hash_seed: int = option(0, "picks the hash function", minimum=0)


@dataclass(slots=True)
class GroupLimitedGateConfig(GateConfig):
    """Group-limited top-k (DeepSeek-V2, arXiv:2405.04434, section 2.1.2): experts from the best groups only."""

    name: str = option("group_limited", "gate class")
    num_groups: int = option(4, "groups of consecutive experts (one a node, for instance)", minimum=1)
    top_groups: int = option(2, "groups that a token may use", minimum=1)
    group_score_k: int = option(
        1, "a group's score is the sum of its best n scores: 1 in DeepSeek-V2, 2 in V3", minimum=1
    )


@dataclass(slots=True)
class AuxFreeGateConfig(GateConfig):
    """Sigmoid scores and a selection bias instead of a loss (arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437)."""

    name: str = option("aux_free", "gate class")
    score: str = option("sigmoid", "from logits to scores", choices=("softmax", "sigmoid"))
    load_balance_coef: float = option(0.0, "weight of E * sum_e f_e P_e", minimum=0.0)
    bias_update_rate: float = option(0.001, "change of the selection bias per optimizer step", minimum=0.0)
    num_groups: int = option(1, "groups of consecutive experts; 1 is no limit", minimum=1)
    top_groups: int = option(1, "groups that a token may use", minimum=1)
    group_score_k: int = option(2, "a group's score is the sum of its best n scores", minimum=1)


@dataclass(slots=True)
class SoftGateConfig(GateConfig):
    """Soft MoE (Puigcerver et al. 2023, arXiv:2308.00951): experts work on weighted means of tokens."""

    name: str = option("soft", "gate class")
    top_k: int = option(1, "has no effect: every token takes part in every slot", minimum=1)
    load_balance_coef: float = option(0.0, "has no use: the load is even by construction", minimum=0.0)
    slots_per_expert: int = option(1, "rows of an expert for each sequence", minimum=1)


GATES: dict[str, type[GateConfig]] = {
    "naive": NaiveGateConfig,
    "noisy": NoisyGateConfig,
    "switch": SwitchGateConfig,
    "gshard": GShardGateConfig,
    "swipe": SwipeGateConfig,
    "zero": ZeroGateConfig,
    "cosine": CosineGateConfig,
    "topology": TopologyGateConfig,
    "expert_choice": ExpertChoiceGateConfig,
    "sinkhorn": SinkhornGateConfig,
    "hash": HashGateConfig,
    "group_limited": GroupLimitedGateConfig,
    "aux_free": AuxFreeGateConfig,
    "soft": SoftGateConfig,
}
