"""Gates: which experts a token goes to, and with what weight.  One class an option of the `gate` group."""

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
    drop_policy: str = option(
        "position", "who is kept when an expert is full", choices=("position", "probability", "random")
    )
    normalize: bool = option(True, "weights of the chosen experts sum to one")
    load_balance_coef: float = option(0.01, "weight of the load-balance loss E * sum_e f_e P_e", minimum=0.0)
    load_balance_scope: str = option(
        "batch",
        "over what f and P are taken: the micro-batch on all data ranks, or each sequence by itself",
        choices=("batch", "sequence"),
    )
    z_loss_coef: float = option(0.0, "weight of mean(logsumexp(logits)^2)", minimum=0.0)
    fp32: bool = option(True, "compute the gate in fp32 whatever the precision")
    bias: bool = option(False, "a bias on the gate's linear layer")


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
    normalize: bool = option(False, "weights of the chosen experts sum to one")
    jitter: float = option(0.01, "training inputs of the gate are scaled by U(1-jitter, 1+jitter)", minimum=0.0)


@dataclass(slots=True)
class GShardGateConfig(GateConfig):
    """GShard (Lepikhin et al. 2020, arXiv:2006.16668, algorithm 1): top-2, the second expert taken by chance."""

    name: str = option("gshard", "gate class")
    top_k: int = option(2, "experts per token", minimum=2, maximum=2)
    capacity_factor: Optional[float] = option(1.2, "see naive", above=0.0)
    eval_capacity_factor: Optional[float] = option(2.4, "see naive", above=0.0)
    random_second: bool = option(True, "keep the second expert with probability min(1, 2 * its weight) in training")


GATES: dict[str, type[GateConfig]] = {
    "naive": NaiveGateConfig,
    "noisy": NoisyGateConfig,
    "switch": SwitchGateConfig,
    "gshard": GShardGateConfig,
}
