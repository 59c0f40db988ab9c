"""Makes an MoE model of a dense one: each MLP that is found becomes an MoE layer, in place.

Found by structure and not by class: two linear maps D -> F -> O with an activation between them, or three for a gated
one, whatever library the model is from.  What was recognized is run beside the module it was read from before anything
is replaced, so an MLP that does more than it seems to (a norm inside, a residual) is refused and not changed silently.

Copying the dense weights into every expert is sparse upcycling (Komatsuzaki et al., 2023, arXiv:2212.05055).
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moeflow.errors import ConfigError
from moeflow.moe import MoELayer
from moeflow.moe.experts import MLPExperts
from moeflow.moe.gates import Gate
from moeflow.ops import activation as activations
from moeflow.schema import GateConfig

Where = str | type | tuple[type, ...] | Callable[[str, nn.Module], bool]

# Where the maps of an MLP stand in a layer that has no module of its own for it: OPT and BART, PyTorch's
# TransformerEncoderLayer, DistilBERT, BERT and its kin.
_IN_LAYER = (("fc1", "fc2"), ("linear1", "linear2"), ("lin1", "lin2"), ("intermediate.dense", "output.dense"))
_GATES = ("gate", "w1", "wi_0")  # in the names of a gated MLP's first map
_TOLERANCE = 1e-3


@dataclass
class _MLP:
    """A dense MLP found in a model.

    Attributes:
        name: of the module that is replaced, or of the layer that holds the maps.
        owner: that module.
        inner: paths of the first maps from the owner: one, or gate and up.
        outer: path of the last map.
        activation: a name of `moeflow.ops.activation.NAMES`.
        acts: paths of activations, where the owner is a layer.
        whole: whether the owner is the MLP and nothing else.
    """

    name: str
    owner: nn.Module
    inner: list[str]
    outer: str
    activation: str = ""
    acts: list[str] = field(default_factory=list)
    whole: bool = True


def moefy(
    model: nn.Module,
    num_experts: int,
    *,
    gate: GateConfig | Gate | str = "naive",
    init: str = "copy",
    noise: float = 0.0,
    d_hidden: int | None = None,
    every: int = 1,
    offset: int = 0,
    where: Where | None = None,
    **options: Any,
) -> nn.Module:
    """Replace MLPs of `model` by MoE layers, in place.

    Args:
        model: any module, for instance one of Transformers.
        num_experts: experts of each layer in all.
        gate: name or configuration; each layer gets one of its own.
        init: "copy" gives every expert the dense weights; "random" draws them anew.
        noise: with "copy", standard deviation of what is added to each expert's weights, as a share of theirs.
        d_hidden: hidden width of one expert; None takes that of the MLP, which "copy" needs.
        every: of the MLPs found, in the model's order, the ones whose number is `offset` modulo `every`.
        offset: see `every`.
        where: which modules to look at: a pattern of names such as "*.layers.*.mlp", a class or several, or a function
            of (name, module); None looks everywhere.
        options: further arguments of `MoELayer`.

    Returns:
        The model.  With init="copy", a gate whose weights sum to one (naive, and others that normalize) and nothing
        dropped, it maps as before.  Dropout inside an MLP goes, dropout behind it stays.

    Raises:
        ConfigError: nothing is found, or an MLP is not one that experts can stand for; the model is unchanged then.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> isinstance(moefy(nn.ModuleDict({"mlp": model}), num_experts=4)["mlp"], MoELayer)
        True
    """
    _check_options(num_experts, init, noise, every, offset)
    if isinstance(gate, Gate):
        raise ConfigError("gate: each layer needs a gate of its own", "pass its name or configuration")
    found = [mlp for mlp in _find(model) if _wanted(where, mlp)]
    if not found:
        raise ConfigError(_nothing_found(model, where), 'where="*.mlp", or a function of (name, module)')
    chosen = [mlp for number, mlp in enumerate(found) if number % every == offset]
    if not chosen:
        raise ConfigError(f"every={every}, offset={offset} takes none of the {len(found)} MLPs found", "offset=0")
    for mlp in chosen:
        _recognize(mlp)
        if init == "copy" and d_hidden not in (None, _width(mlp)):
            raise ConfigError(
                f"d_hidden={d_hidden}: experts that are copies of {mlp.name} have its hidden width, {_width(mlp)}",
                'd_hidden=None, or init="random"',
            )
    layers = [_layer(mlp, num_experts, gate, d_hidden, options) for mlp in chosen]
    for mlp, layer in zip(chosen, layers, strict=True):
        if init == "copy":
            _copy(mlp, layer.experts, noise)
        _replace(model, mlp, layer)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # its fast path reads the weights of the maps that are gone
    return model


def _check_options(num_experts: int, init: str, noise: float, every: int, offset: int) -> None:
    if num_experts < 1:
        raise ConfigError(f"num_experts={num_experts}: an MoE layer needs at least one expert", "num_experts=8")
    if init not in ("copy", "random"):
        raise ConfigError(f'init={init!r}: valid are "copy" and "random"', 'init="copy"')
    if noise < 0:
        raise ConfigError(f"noise={noise}: a standard deviation cannot be negative", "noise=0.0")
    if every < 1 or not 0 <= offset < every:
        raise ConfigError(f"every={every}, offset={offset}: must be 0 <= offset < every", "every=1, offset=0")


# --- finding ---------------------------------------------------------------------------------------------------------


def _find(model: nn.Module) -> list[_MLP]:
    """MLPs in the order of the model's modules; none inside another or inside an MoE layer."""
    found: list[_MLP] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        mlp = None
        if isinstance(module, MoELayer):
            inside.update(map(id, module.modules()))
        elif name or not isinstance(module, nn.Sequential):
            mlp = _whole(name, module) or _in_layer(name, module)
        if mlp is not None:
            found.append(mlp)
            parts = module.modules() if mlp.whole else (module.get_submodule(path) for path in [*mlp.inner, mlp.outer])
            inside.update(map(id, parts))
    return found


def _whole(name: str, module: nn.Module) -> _MLP | None:
    """An MLP that is a module and holds nothing else with parameters."""
    if not name:
        return None  # it has no parent to be replaced in
    maps = {path: _sizes(child) for path, child in module.named_children() if any(True for _ in child.parameters())}
    if not all(map(any, maps.values())) or next(module.parameters(recurse=False), None) is not None:
        return None
    paths, sizes = list(maps), list(maps.values())
    if len(paths) == 2 and sizes[0][1] == sizes[1][0]:
        return _MLP(name, module, paths[:1], paths[1])
    if len(paths) != 3:
        return None
    # Gated: two of D -> F and one back.
    for outer in range(3):
        first, second = (i for i in range(3) if i != outer)
        if sizes[first] == sizes[second] and sizes[outer][0] == sizes[first][1]:
            inner = [paths[first], paths[second]]
            named = [path for path in inner if any(mark in path for mark in _GATES)]
            if len(named) == 1:
                return _MLP(name, module, sorted(inner, key=lambda path: path != named[0]), paths[outer])
    return None


def _in_layer(name: str, module: nn.Module) -> _MLP | None:
    """An MLP whose maps are parts of a layer that holds more."""
    for inner, outer in _IN_LAYER:
        try:
            sizes = _sizes(module.get_submodule(inner)), _sizes(module.get_submodule(outer))
        except AttributeError:
            continue
        if any(sizes[0]) and sizes[0][1] == sizes[1][0]:
            return _MLP(name, module, [inner], outer, whole=False)
    return None


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear map of GPT-2 in Transformers, whose weight is transposed."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "weight")


def _sizes(module: Any) -> tuple[int, int]:
    """(width in, width out) of a linear map; (0, 0) of anything else."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    return (module.weight.shape[0], module.weight.shape[1]) if _is_conv1d(module) else (0, 0)


def _wanted(where: Where | None, mlp: _MLP) -> bool:
    if where is None:
        return True
    if isinstance(where, str):
        return fnmatch.fnmatchcase(mlp.name, where)
    if isinstance(where, (type, tuple)):
        return isinstance(mlp.owner, where)
    return where(mlp.name, mlp.owner)


def _nothing_found(model: nn.Module, where: Where | None) -> str:
    names = [mlp.name or "(the model itself)" for mlp in _find(model)]
    if names:
        shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        return f"where={where!r} matches none of the MLPs of {type(model).__name__}: {shown}"
    return f"{type(model).__name__} has no MLP: two linear maps with an activation between them, or three if gated"


# --- recognizing -----------------------------------------------------------------------------------------------------


def _recognize(mlp: _MLP) -> None:
    """Find the activation, and make sure that maps and activation are all that the module computes."""
    inner = [mlp.owner.get_submodule(path) for path in mlp.inner]
    biases = {getattr(m, "bias", None) is not None for m in [*inner, mlp.owner.get_submodule(mlp.outer)]}
    if len(biases) > 1:
        raise ConfigError(f"{mlp.name}: some of its linear maps have a bias and some have none", "where= without it")
    names = _activations(mlp)
    if len(names) != 1:
        listed = ", ".join(sorted(names)) or "none"
        raise ConfigError(
            f"{mlp.name} ({type(mlp.owner).__name__}): it must have one activation of relu, gelu, gelu_tanh or silu, "
            f"and has {listed}",
            "where= without it",
        )
    (name,) = names
    mlp.activation = {"relu": "reglu", "gelu": "geglu", "silu": "swiglu"}.get(name, name) if len(inner) == 2 else name
    if len(inner) == 2 and not activations.is_gated(mlp.activation):
        raise ConfigError(f"{mlp.name}: gated experts have relu, gelu or silu, and not {name}", "where= without it")
    if mlp.whole:
        _try(mlp)


def _activations(mlp: _MLP) -> set[str]:
    """Names of the activations that the module holds, as modules or functions."""
    places: list[tuple[str, Any]] = [(path, m) for path, m in mlp.owner.named_modules() if not _has_parameters(m)]
    holders = {
        "": mlp.owner,
        **{p.rpartition(".")[0]: mlp.owner.get_submodule(p.rpartition(".")[0]) for p in mlp.inner},
    }
    for prefix, holder in holders.items():
        for key, value in vars(holder).items():
            if callable(value) and not isinstance(value, type) and "act" in key:
                places.append((f"{prefix}.{key}".lstrip("."), value))
    names: set[str] = set()
    for path, function in places:
        if not mlp.whole and "." in path and path.rpartition(".")[0] not in holders:
            continue  # of attention, say
        name = _name_of(function)
        if name is not None:
            names.add(name)
            mlp.acts.append(path)
    return names


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.children())


def _name_of(function: Callable[[Tensor], Tensor]) -> str | None:
    """The activation that a function computes, found by its values."""
    points = torch.linspace(-4, 4, 33)
    try:
        with torch.no_grad(), torch.device("cpu"):
            values = function(points)
    except Exception:  # whatever it is, it does not map a tensor
        return None
    if not isinstance(values, Tensor) or values.shape != points.shape:
        return None
    for name in activations.NAMES:
        if not activations.is_gated(name) and torch.allclose(values, activations.forward(name, points), atol=1e-6):
            return name
    return None


def _try(mlp: _MLP) -> None:
    """Run the module, and one expert with its weights, on the same numbers."""
    owner = copy.deepcopy(mlp.owner).eval()
    if any(p.is_meta for p in owner.parameters()):
        return
    owner.float()
    expert = MLPExperts(1, _sizes(owner.get_submodule(mlp.inner[0]))[0], _width(mlp), **_shape(mlp))
    copied = _MLP(mlp.name, owner, mlp.inner, mlp.outer, mlp.activation)
    _copy(copied, expert.to(next(owner.parameters()).device), 0.0)
    x = torch.randn(1, 5, expert.d_model, generator=torch.Generator().manual_seed(0)).to(
        next(owner.parameters()).device
    )
    try:
        with torch.no_grad():
            wanted = owner(x)
            found = expert(x[0], torch.tensor([5], device=x.device))
    except Exception as error:
        raise ConfigError(f"{mlp.name} ({type(owner).__name__}) does not run on a tensor alone: {error}") from error
    if not isinstance(wanted, Tensor) or not torch.allclose(wanted[0], found, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise ConfigError(
            f"{mlp.name} ({type(owner).__name__}) computes more than its linear maps and {mlp.activation}",
            "where= without it, or MoELayer(experts=...) with experts of that class",
        )


# --- replacing -------------------------------------------------------------------------------------------------------


def _width(mlp: _MLP) -> int:
    return _sizes(mlp.owner.get_submodule(mlp.outer))[0]


def _shape(mlp: _MLP) -> dict[str, Any]:
    outer = mlp.owner.get_submodule(mlp.outer)
    return {
        "d_out": _sizes(outer)[1],
        "activation": mlp.activation,
        "bias": getattr(outer, "bias", None) is not None,
    }


def _layer(
    mlp: _MLP, num_experts: int, gate: GateConfig | str, d_hidden: int | None, options: dict[str, Any]
) -> MoELayer:
    first: Any = mlp.owner.get_submodule(mlp.inner[0])
    weight: Tensor = first.weight
    with torch.device(weight.device):
        layer = MoELayer(
            _sizes(first)[0],
            num_experts,
            d_hidden=_width(mlp) if d_hidden is None else d_hidden,
            gate=copy.deepcopy(gate),
            **{**_shape(mlp), **options},
        )
    return layer.to(weight.dtype).train(mlp.owner.training)


@torch.no_grad()
def _copy(mlp: _MLP, experts: nn.Module, noise: float) -> None:
    """Give every expert the MLP's weights."""
    assert isinstance(experts, MLPExperts)
    inner: list[Any] = [mlp.owner.get_submodule(path) for path in mlp.inner]
    outer: Any = mlp.owner.get_submodule(mlp.outer)
    pairs = [(experts.w_in, torch.stack([_weight(m) for m in inner]).squeeze(0)), (experts.w_out, _weight(outer))]
    if experts.b_in is not None and experts.b_out is not None:
        biases = torch.stack([m.bias for m in inner]).squeeze(0)
        pairs += [(experts.b_in, biases), (experts.b_out, outer.bias)]
    for parameter, dense in pairs:
        parameter.copy_(dense.expand_as(parameter))
        if noise and dense.dim() > 1:
            parameter.add_(torch.randn_like(parameter), alpha=noise * dense.float().std().item())


def _weight(module: Any) -> Tensor:
    return module.weight.t() if _is_conv1d(module) else module.weight


def _replace(model: nn.Module, mlp: _MLP, layer: MoELayer) -> None:
    if mlp.whole:
        drop = [m for m in mlp.owner.children() if isinstance(m, nn.Dropout)]
        last = list(mlp.owner.children())[-1]
        # A dropout that stands behind the last map works on the layer's output.
        new = nn.Sequential(layer, last) if drop and last is drop[-1] and last.p > 0 else layer
        _set(model, mlp.name, new)
        return
    _set(mlp.owner, mlp.inner[0], layer)
    _set(mlp.owner, mlp.outer, nn.Identity())
    for path in mlp.acts:
        _set(mlp.owner, path, nn.Identity())
    if isinstance(mlp.owner, nn.TransformerEncoderLayer):
        mlp.owner.activation_relu_or_gelu = 0  # no fast path


def _set(root: nn.Module, path: str, value: Any) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, value)
