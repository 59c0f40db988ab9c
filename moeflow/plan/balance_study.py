"""What balancing would bring on a recorded trace, for the sizes of one model: used by `moeflow plan --trace`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeflow.errors import ConfigError
from moeflow.plan.cluster import Cluster
from moeflow.plan.cost import ExpertShape, Grouping
from moeflow.plan.layouts import Candidate
from moeflow.plan.model_size import ModelSize
from moeflow.plan.placement import place_experts
from moeflow.plan.simulate import Policy, Simulator
from moeflow.plan.traces import Trace
from moeflow.schema.layout import divisors

#: Layers and samples that are played; the first and the last are always among them.
_LAYERS, _SAMPLES = 6, 12

POLICIES = {
    "none": Policy(),
    "shadow": Policy(shadow=True),
    "placement": Policy(place=True, interval=1, decay=0.0, horizon=1000),
    "replicas, 1 spare slot": Policy(spare=1, interval=1, decay=0.0, horizon=1000),
    "replicas and shadows": Policy(shadow=True, spare=1, interval=1, decay=0.0, horizon=1000),
}


@dataclass(frozen=True, slots=True)
class Gain:
    """One policy on the trace.

    Attributes:
        name: of POLICIES.
        imbalance: mean over layers and samples.
        layer_s: predicted seconds of one MoE layer and micro-batch, without the price of moves.
        shadows: experts shadowed, mean.
    """

    name: str
    imbalance: float
    layer_s: float
    shadows: float


@dataclass(frozen=True, slots=True)
class Study:
    """A trace, and what it says about a model.

    Attributes:
        trace: recorded counts.
        model: sizes.
        cluster: ranks and coefficients.
        dtype: of the computation.
        by_ranks: imbalance without balancing, by ranks that experts are spread over.
    """

    trace: Trace
    model: ModelSize
    cluster: Cluster
    dtype: str
    by_ranks: Mapping[int, float]

    def gains(self, plan: Candidate) -> list[Gain]:
        """Play the policies on one layout; plans see the sample before."""
        layer = next(layer for layer in self.model.layers if layer.num_experts)
        shape = ExpertShape(self.model.d_model, layer.d_hidden // plan.etp, True, self.dtype)
        grouping = Grouping(plan.ep, self.cluster.near(plan.ep, plan.etp))
        simulator = Simulator(self.cluster.profile, shape, grouping)
        rows = round(plan.micro_batch * self.model.seq_len / plan.tp * self.model.top_k * plan.etp)
        found = []
        for name, policy in POLICIES.items():
            runs = [simulator.run(steps, policy) for steps in self._steps(plan.ep, rows)]
            # The first step of each run plans nothing: nothing is known before it.
            imbalance = float(np.mean([run.imbalance[1:] for run in runs]))
            quiet = float(np.mean([np.median(run.seconds[1:]) for run in runs]))
            found.append(Gain(name, imbalance, quiet, float(np.mean([run.shadows[1:] for run in runs]))))
        return found

    def placement(self, plan: Candidate) -> list[list[int]]:
        """[L][E] rank of each expert of each recorded layer, from the last sample."""
        loads = self.trace.counts[-1].sum(0)
        return [place_experts(load, plan.ep).tolist() for load in loads]

    def _steps(self, ranks: int, rows: int) -> Iterator[list[NDArray[np.int64]]]:
        """The trace's shares of experts, drawn anew for the ranks and rows of the layout."""
        counts = self.trace.counts
        samples, _, layers, _ = counts.shape
        rng = np.random.default_rng(0)
        for layer in np.unique(np.linspace(0, layers - 1, min(_LAYERS, layers)).astype(int)):
            picked = np.unique(np.linspace(0, samples - 1, min(_SAMPLES, samples)).astype(int))
            loads = counts[picked, :, layer].sum(1).astype(np.float64)
            yield [rng.multinomial(rows, load / load.sum(), size=ranks) for load in loads]


def study(trace: Trace, model: ModelSize, cluster: Cluster, dtype: str) -> Study:
    """Read the imbalance of a trace for all numbers of ranks.

    Args:
        trace: recorded counts.
        model: sizes; as many experts as the trace has.
        cluster: ranks and coefficients.
        dtype: of the computation.

    Raises:
        ConfigError: another number of experts, or too few samples.
    """
    samples, _, layers, experts = trace.counts.shape
    if experts != model.num_experts:
        raise ConfigError(
            f"the trace has {experts} experts, the model {model.num_experts}", f"model.num_experts={experts}"
        )
    if samples < 2:
        raise ConfigError("the trace has one sample; plans need one to learn from and one to be judged by", "two")
    loads = trace.counts.sum(1)
    by_ranks = {}
    for ranks in divisors(experts):
        per_rank = loads.reshape(samples, layers, ranks, experts // ranks).sum(-1)
        by_ranks[ranks] = float((per_rank.max(-1) / np.maximum(per_rank.mean(-1), 1e-12)).mean())
    return Study(trace, model, cluster, dtype, by_ranks)
