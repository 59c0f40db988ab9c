"""The experts of one layer.

Legend: R rows, D model, F ffn, E experts of the layer in all, L experts on this rank, O output width.

Expert parameters are stacked over the experts of this rank, so that an idle expert has a zero gradient and never a
missing one, and so that one grouped product serves all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moeflow import ops
from moeflow.errors import ConfigError
from moeflow.ops import activation as activations
from moeflow.ops.phases import phase

# Keys -> the generator that a parameter is drawn from.  The key of an expert is its number in the whole layer.
Generators = Callable[..., torch.Generator | None]


class Experts(nn.Module):
    """Base of everything that maps rows ordered by expert to rows: all its parameters are expert parameters.

    Attributes:
        num_experts: experts of the layer in all.
        first_expert: number, in the whole layer, of the first expert on this rank.
        num_local: experts on this rank.
        d_out: width of the output rows.
        stacked: whether dimension 0 of each parameter is the experts of this rank.  Otherwise each parameter belongs to
            one expert, whose number in the whole layer is part of its name.

    A subclass whose parameters are all those of `Experts` inside it (such as `GroupedLinear`) has only to define
    `forward`; with parameters of its own it also defines `shard` and `init_parameters`.
    """

    stacked = True

    def __init__(self, num_experts: int, d_out: int):
        super().__init__()
        self.num_experts = num_experts
        self.first_expert = 0
        self.num_local = num_experts
        self.d_out = d_out

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module, as a phase of its own in a profile: whatever dispatcher calls it."""
        with phase("experts"):
            return super().__call__(*args, **kwargs)

    def forward(self, rows_RD: Tensor, tokens_per_expert_L: Tensor) -> Tensor:
        """Map rows [R, D], ordered by local expert, to [R, O]; int64 [L] rows of each expert sum to R."""
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def shard(self, ep_rank: int, ep: int, etp_rank: int = 0, etp: int = 1) -> None:
        """Keep only this rank's experts, and its slice of their hidden dimension.  Called before values exist."""
        self._needs_no("shard")
        self._share_out(ep_rank, ep, 1)
        for inner in _inner_experts(self):
            inner.shard(ep_rank, ep, etp_rank, etp)

    def _share_out(self, ep_rank: int, ep: int, etp: int) -> None:
        assert self.num_experts % ep == 0, "checked when the layout was"
        if etp > 1:
            raise ConfigError(
                f"parallel.etp={etp}: experts of class {type(self).__name__} cannot be cut over ranks", "parallel.etp=1"
            )
        self.num_local = self.num_experts // ep
        self.first_expert = ep_rank * self.num_local

    def _needs_no(self, method: str) -> None:
        inner = {id(p) for experts in _inner_experts(self) for p in experts.parameters()}
        if any(id(p) not in inner for p in self.parameters()):
            raise NotImplementedError(f"{type(self).__name__} holds parameters of its own and must define {method}")

    def hidden_dims(self) -> dict[str, int]:
        """Dimension of each parameter that `shard` cuts over etp; parameters left out are whole on every etp rank.

        The gradient of a whole one is the sum over the etp ranks, so only one of them may use it, or each a part.
        """
        return {}

    def init_parameters(self, generator: Generators) -> None:
        """Draw the parameters, each expert from `generator(parameter, expert)`."""
        self._needs_no("init_parameters")


def _inner_experts(module: nn.Module) -> Iterator[Experts]:
    for child in module.children():
        if isinstance(child, Experts):
            yield child
        else:
            yield from _inner_experts(child)


class MLPExperts(Experts):
    """Two-layer MLPs, stacked: activation(x w_in^T + b_in) w_out^T + b_out.

    Args:
        num_experts: experts of the layer in all.
        d_model: width of the input rows.
        d_hidden: hidden width of one expert.
        d_out: width of the output rows; None takes d_model.
        activation: relu, gelu, gelu_tanh, silu, or gated: swiglu, geglu, reglu.
        bias: whether both layers have one.
        init_std: standard deviation of normal initial values; None draws as nn.Linear does, from the fan-in of one
            expert (not of the stack).
        out_init_std: the same for the second layer; None takes init_std.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_hidden: int,
        d_out: int | None = None,
        activation: str = "gelu",
        bias: bool = True,
        init_std: float | None = None,
        out_init_std: float | None = None,
    ):
        super().__init__(num_experts, d_model if d_out is None else d_out)
        self.d_model, self.d_hidden = d_model, d_hidden
        self.hidden_slice = slice(0, d_hidden)
        self.activation = activations.check(activation)
        self.has_bias = bias
        self.init_std = init_std
        self.out_init_std = init_std if out_init_std is None else out_init_std
        self._allocate()
        if not self.w_in.is_meta:
            self.reset_parameters()

    def _allocate(self) -> None:
        hidden = self.hidden_slice.stop - self.hidden_slice.start
        halves = (2,) if activations.is_gated(self.activation) else ()
        self.w_in = nn.Parameter(torch.empty(self.num_local, *halves, hidden, self.d_model))
        self.w_out = nn.Parameter(torch.empty(self.num_local, self.d_out, hidden))
        self.b_in = nn.Parameter(torch.empty(self.num_local, *halves, hidden)) if self.has_bias else None
        # The output bias is whole on every etp rank; the first one adds it to its part of the sum.
        self.b_out = nn.Parameter(torch.empty(self.num_local, self.d_out)) if self.has_bias else None

    def forward(self, rows_RD: Tensor, tokens_per_expert_L: Tensor) -> Tensor:
        b_out = self.b_out if self.hidden_slice.start == 0 else None
        return ops.grouped_mlp(rows_RD, tokens_per_expert_L, self.w_in, self.b_in, self.w_out, b_out, self.activation)

    def hidden_dims(self) -> dict[str, int]:
        dims = {"w_in": self.w_in.ndim - 2, "w_out": 2}
        return {**dims, "b_in": self.b_in.ndim - 1} if self.b_in is not None else dims

    def shard(self, ep_rank: int, ep: int, etp_rank: int = 0, etp: int = 1) -> None:
        assert self.num_experts % ep == 0 and self.d_hidden % etp == 0, "checked when the layout was"
        self.num_local = self.num_experts // ep
        self.first_expert = ep_rank * self.num_local
        width = self.d_hidden // etp
        self.hidden_slice = slice(etp_rank * width, (etp_rank + 1) * width)
        with self.w_in.device:
            self._allocate()

    def reset_parameters(self) -> None:
        """Draw all parameters from torch's default generator."""
        self.init_parameters(lambda *keys: None)

    @torch.no_grad()
    def init_parameters(self, generator: Generators) -> None:
        for local in range(self.num_local):
            expert = self.first_expert + local
            generators = generator("w_in", expert), generator("w_out", expert)
            if self.w_out.shape[-1] == self.d_hidden:
                self._draw(self.w_in[local], self.d_model, self.init_std, generators[0])
                self._draw(self.w_out[local], self.d_hidden, self.out_init_std, generators[1])
                continue
            # A slice of the hidden dimension is cut from the whole expert's values: the same on every layout.
            w_in = self.w_in.new_empty(*self.w_in.shape[1:-2], self.d_hidden, self.d_model)
            self._draw(w_in, self.d_model, self.init_std, generators[0])
            self.w_in[local] = w_in[..., self.hidden_slice, :]
            w_out = self.w_out.new_empty(self.d_out, self.d_hidden)
            self._draw(w_out, self.d_hidden, self.out_init_std, generators[1])
            self.w_out[local] = w_out[:, self.hidden_slice]
        for bias in (self.b_in, self.b_out):
            if bias is not None:
                bias.zero_()

    @staticmethod
    def _draw(out: Tensor, fan_in: int, std: float | None, generator: torch.Generator | None) -> None:
        if std is None:
            bound = 1.0 / math.sqrt(fan_in)
            out.uniform_(-bound, bound, generator=generator)
        else:
            out.normal_(0.0, std, generator=generator)

    def extra_repr(self) -> str:
        return (
            f"experts={self.num_experts}, on this rank={self.num_local}, d_model={self.d_model}, "
            f"d_hidden={self.d_hidden}, d_out={self.d_out}, activation={self.activation}, bias={self.has_bias}"
        )
