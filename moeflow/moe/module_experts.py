"""Experts that are modules of the user's own.

Legend: R rows, D model, E experts of the layer in all, L experts on this rank, O output width.

A factory maps d_model to a module, which maps [rows, D] to [rows, O] (or trees of tensors to trees of tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moeflow.errors import ConfigError
from moeflow.moe.experts import Experts, Generators
from moeflow.moe.tree import Tree, leaves, tree_map, unflatten

Factory = Callable[[int], nn.Module]


def experts_from(factories: Factory | Sequence[Factory], num_experts: int, d_model: int, d_out: int) -> Experts:
    """Experts of a user's own kind: stacked where all are built alike and hold no buffers, else a list of modules."""
    if callable(factories):
        with torch.device("meta"):
            has_buffers = any(True for _ in factories(d_model).buffers())
        if not has_buffers:
            return ModuleExperts(factories, num_experts, d_model, d_out)
        factories = [factories] * num_experts
    if len(factories) != num_experts:
        raise ConfigError(
            f"experts: a list of {len(factories)}, but the layer has num_experts={num_experts}",
            f"num_experts={len(factories)}",
        )
    return ListExperts(factories, d_model, d_out)


class _UserExperts(Experts):
    """Calls one module for each expert on the rows that are its own."""

    def callables(self) -> list[Callable[[Tree], Tree]]:
        """The experts of this rank as functions from their rows to their outputs."""
        raise NotImplementedError(f"{type(self).__name__} must define callables")

    def forward(self, rows_RD: Tree, tokens_per_expert_L: Tensor) -> Tree:
        """Map rows ordered by local expert; an expert without rows is not called."""
        counts, experts = tokens_per_expert_L.tolist(), self.callables()
        pieces = dict(enumerate(zip(*(leaf.split(counts) for leaf in leaves(rows_RD)), strict=True)))
        # Where no expert has rows, the first one is asked what no rows come to.
        called = [local for local, count in enumerate(counts) if count] or [0]
        outs = [experts[local](unflatten(rows_RD, pieces[local])) for local in called]
        out = tree_map(lambda *parts: torch.cat(parts), *outs)
        return self._with_idle(out, [local for local in range(len(counts)) if local not in called])

    def _with_idle(self, out: Tree, idle: list[int]) -> Tree:
        return out


class ModuleExperts(_UserExperts):
    """Experts of one user-given class, their parameters stacked over the experts of this rank.

    A parameter `fc.weight` of the class is the parameter `fc__weight` here, [L, ...].  An idle expert has a zero
    gradient.  Parameters cannot be shared between experts, and the class may not hold buffers.

    Args:
        factory: builds one expert from d_model.  It draws its own initial values, from torch's generator seeded for
            the expert, so that they do not depend on the layout.
        num_experts: experts of the layer in all.
        d_model: width of the input rows.
        d_out: width of the output rows.
    """

    def __init__(self, factory: Factory, num_experts: int, d_model: int, d_out: int):
        super().__init__(num_experts, d_out)
        self._factory, self._d_model = factory, d_model
        with torch.device("meta"):
            template = factory(d_model)
        # In a tuple, so that its parameters are not this module's.
        self._template = (template,)
        self._names = {name: name.replace(".", "__") for name, _ in template.named_parameters()}
        self._allocate()
        if not any(p.is_meta for p in self.parameters()):
            self.reset_parameters()

    def _allocate(self, device: torch.device | None = None) -> None:
        for name, parameter in self._template[0].named_parameters():
            empty = torch.empty(self.num_local, *parameter.shape, dtype=parameter.dtype, device=device)
            self.register_parameter(self._names[name], nn.Parameter(empty, requires_grad=parameter.requires_grad))

    def shard(self, ep_rank: int, ep: int, etp_rank: int = 0, etp: int = 1) -> None:
        device = next((p.device for p in self.parameters()), None)
        self._share_out(ep_rank, ep, etp)
        self._allocate(device)

    def reset_parameters(self) -> None:
        """Draw all experts from torch's default generator."""
        self.init_parameters(lambda *keys: None)

    @torch.no_grad()
    def init_parameters(self, generator: Generators) -> None:
        for local in range(self.num_local):
            source = generator("module", self.first_expert + local)
            with torch.random.fork_rng(devices=[], enabled=source is not None), torch.device("cpu"):
                if source is not None:
                    torch.manual_seed(source.initial_seed())
                expert = self._factory(self._d_model)
            for name, value in expert.named_parameters():
                getattr(self, self._names[name])[local] = value

    def callables(self) -> list[Callable[[Tree], Tree]]:
        template = self._template[0].train(self.training)
        # Unbound once: indexing the stack would make a gradient of its full size for every expert.
        stacks = {name: getattr(self, own).unbind(0) for name, own in self._names.items()}
        return [
            partial(_call, template, {name: stack[local] for name, stack in stacks.items()})
            for local in range(self.num_local)
        ]

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, on this rank={self.num_local}, each={self._template[0]}"


def _call(template: nn.Module, parameters: dict[str, Tensor], rows: Tree) -> Tree:
    return torch.func.functional_call(template, parameters, (rows,))


class ListExperts(_UserExperts):
    """Experts of any classes, a module each.

    Attributes:
        experts: the modules on this rank by their number in the whole layer.

    Args:
        factories: builds each expert from d_model.
        d_model: width of the input rows.
        d_out: width of the output rows.
    """

    stacked = False

    def __init__(self, factories: Sequence[Factory], d_model: int, d_out: int):
        super().__init__(len(factories), d_out)
        self.experts = nn.ModuleDict({str(e): factory(d_model) for e, factory in enumerate(factories)})

    def shard(self, ep_rank: int, ep: int, etp_rank: int = 0, etp: int = 1) -> None:
        self._share_out(ep_rank, ep, etp)
        mine = range(self.first_expert, self.first_expert + self.num_local)
        self.experts = nn.ModuleDict({str(e): self.experts[str(e)] for e in mine})

    def init_parameters(self, generator: Generators) -> None:
        """Nothing: each expert's modules draw their own, under names that hold the expert's number in the layer."""

    def callables(self) -> list[Callable[[Tree], Tree]]:
        return list(self.experts.values())

    def _with_idle(self, out: Tree, idle: list[int]) -> Tree:
        modules = list(self.experts.values())
        parameters = [p for local in idle for p in modules[local].parameters()]
        parameters = [p for p in parameters if p.requires_grad]
        if not parameters or not torch.is_grad_enabled():
            return out
        first = leaves(out)[0]
        touched = _ZeroGradients.apply(first, *parameters)
        return tree_map(lambda leaf: touched if leaf is first else leaf, out)


class _ZeroGradients(torch.autograd.Function):
    """Passes a tensor through; its backward gives the parameters of idle experts zero gradients."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *(torch.zeros_like(p) for p in ctx.saved_tensors)
