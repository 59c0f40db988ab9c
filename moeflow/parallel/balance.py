"""Balance of all MoE layers of this rank's part of a model, over a run: what `moeflow.parallel.balancer` decides in a
step, and what changes between steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from moeflow.errors import ConfigError
from moeflow.moe import Experts, MoELayer
from moeflow.parallel import collectives
from moeflow.parallel.balancer import Balancer
from moeflow.parallel.dispatcher import RankDispatcher
from moeflow.parallel.exchange import expert_shape
from moeflow.parallel.nodes import grouping_of, own_node
from moeflow.parallel.parallelize import moe_layers
from moeflow.parallel.placement import move_experts, order_of, places_of
from moeflow.parallel.topology import Topology
from moeflow.plan.profile import Profile
from moeflow.schema import BalanceConfig

State = dict[str, Any]
_MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Balance:
    """The balancers of a model's MoE layers; without any, all of it does nothing.

    Attributes:
        balancers: by the layer's name.
        layers: likewise.
    """

    def __init__(self, topology: Topology, config: BalanceConfig, micro_batches: int = 1):
        self.topology, self.config, self.micro_batches = topology, config, micro_batches
        self.device: torch.device | None = None
        self.layers: dict[str, MoELayer] = {}
        self.balancers: dict[str, Balancer] = {}

    @classmethod
    def of(
        cls,
        model: nn.Module,
        topology: Topology,
        config: BalanceConfig,
        profile: Profile,
        dtype: str,
        micro_batches: int = 1,
    ) -> Balance:
        """Give every MoE layer of this rank's part its balancer; every rank calls it.

        Args:
            model: this rank's part.
            topology: of this rank.
            config: what was asked for.
            profile: coefficients, the same on all ranks.
            dtype: `precision.dtype`.
            micro_batches: forward passes of one optimizer step.

        Raises:
            ConfigError: experts that cannot be brought to other ranks.
        """
        found, ep, etp = cls(topology, config, micro_batches), topology["ep"], topology["etp"]
        found.device = next((p.device for p in model.parameters()), None)
        if not config.active or ep.size == 1:
            return found
        grouping = grouping_of(collectives.gather_objects(own_node(), ep))
        for name, layer in moe_layers(model).items():
            check_experts(name, layer.experts)
            assert isinstance(layer.dispatcher, RankDispatcher), "ep > 1"
            own = next(layer.experts.parameters()).dtype
            shape = expert_shape(layer.experts, layer.d_model, _MIXED.get(dtype, own), etp.size)
            balancer = Balancer(config, profile, shape, grouping, layer.num_experts)
            found.layers[name] = layer
            layer.dispatcher.balancer = found.balancers[name] = balancer
        return found

    def end_step(self, step: int, optimizer: Optimizer) -> None:
        """After an optimizer step that was taken; collective where experts may move.

        Args:
            step: number of steps done.
            optimizer: whose state of an expert moves with it.
        """
        for balancer in self.balancers.values():
            balancer.end_step()
        if self.balancers and self.config.placement and step % self.config.interval == 0:
            for name, order in self._decided().items():
                self.move(name, order, optimizer)

    def _decided(self) -> dict[str, list[int]]:
        """New orders of the experts of layers where a move pays: the first rank of the stage decides for all.

        Ranks that hold the same experts (edp) and slices of them (etp) see other rows, but must move alike.
        """
        stage, found = self.topology["stage"], {}
        for name, balancer in self.balancers.items():
            if balancer.history_E is None:
                continue
            own = torch.tensor(balancer.history_E, dtype=torch.float64, device=self.device)
            load_E = (collectives.all_reduce(own, stage) / stage.size).cpu().numpy()
            decision = balancer.decide_move(load_E, self.config.interval * self.micro_batches)
            if decision.moved:
                ranks = balancer.grouping.ranks
                found[name] = order_of(np.asarray(decision.owner), balancer.order_E, ranks).tolist()
        return collectives.broadcast_object(found, stage)

    def move(self, name: str, order: list[int], optimizer: Optimizer | None) -> None:
        """Let the experts of a layer stand in another order from now on; collective."""
        balancer, layer = self.balancers[name], self.layers[name]
        order_E = np.array(order, dtype=np.int64)
        move_experts(layer.experts, optimizer, balancer.order_E, order_E, self.topology["ep"])
        balancer.reorder(order_E)
        layer.places_E = places_of(order_E, next(layer.experts.parameters()).device)

    @contextmanager
    def at_home(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, every expert stands where it would without a placement; collective, and not for forward passes."""
        self._carry(optimizer, home=True)
        try:
            yield
        finally:
            self._carry(optimizer, home=False)

    def _carry(self, optimizer: Optimizer, home: bool) -> None:
        for name, balancer in self.balancers.items():
            there, here = np.arange(len(balancer.order_E)), balancer.order_E
            old_E, new_E = (here, there) if home else (there, here)
            move_experts(self.layers[name].experts, optimizer, old_E, new_E, self.topology["ep"])

    def metrics(self) -> dict[str, float]:
        """What was done in the last step; every rank must call it.

        Returns:
            balance/imbalance_before, balance/imbalance: rows of the busiest rank over the mean, each expert's on
            its own rank, and as they were computed; mean over the layers.
            balance/shadowed: experts, mean over the layers.
            balance/migrations: experts that changed their rank since the last call, summed over the layers.
            balance/bytes_sent: by a rank in the mean, of rows and shadows, forward and backward of one micro-batch,
            summed over the layers.
            balance/predicted_s: seconds of the layers that the cost model predicts for the same.
            Empty without balance.
        """
        if not self.config.active or self.topology["ep"].size == 1:
            return {}
        stage = self.topology["stage"]
        own = []
        for balancer in self.balancers.values():
            if balancer.done is not None:
                names, values = zip(*balancer.metrics().items(), strict=True)
                mean = (
                    collectives.all_reduce(torch.tensor(values, dtype=torch.float64, device=self.device), stage)
                    / stage.size
                )
                own.append(dict(zip(names, mean.tolist(), strict=True)))
        rows = [row for part in collectives.gather_objects(own, self.topology["pp"]) for row in part]
        totals = {name: sum(row[name] for row in rows) for name in (rows[0] if rows else ())}
        mean_of = ("imbalance_before", "imbalance", "shadowed")
        return {f"balance/{name}": total / len(rows) if name in mean_of else total for name, total in totals.items()}

    def state(self) -> State:
        """What a resumed run of the same layout needs of this rank, as JSON; empty without balance."""
        return {name: balancer.state() for name, balancer in self.balancers.items()}

    def load_state(self, state: State, optimizer: Optimizer) -> None:
        """Take it back, with every expert at home before; layers that it does not hold start anew.  Collective."""
        for name, balancer in self.balancers.items():
            if name in state:
                if self.config.placement:
                    self.move(name, state[name]["order"], optimizer)
                balancer.load_state(state[name])


def check_experts(name: str, experts: Experts) -> None:
    """Refuse experts that cannot be brought to other ranks.

    Raises:
        ConfigError: they are not stacked, or hold what does not travel.
    """
    parameters = list(experts.parameters())
    if not experts.stacked or any(True for _ in experts.buffers()):
        raise ConfigError(
            f"balance: the experts of {name} are modules of their own or hold buffers, and cannot be brought to other "
            "ranks",
            "balance=none, or experts that are all of one class without buffers",
        )
    if not parameters or len({parameter.dtype for parameter in parameters}) > 1:
        raise ConfigError(
            f"balance: the experts of {name} must have parameters, all of one dtype",
            "balance=none, or parameters of one dtype",
        )
