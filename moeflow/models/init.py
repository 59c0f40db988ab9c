"""Initial values that do not depend on the layout.

Each leaf module draws its parameters from generators of its own, seeded by (seed, the module's global name); stacked
experts additionally by (parameter, number of the expert in the whole layer).  So it does not matter which rank holds a
parameter, in what order modules are built, or how many experts a rank has.  Values are drawn on the CPU, hence the same
on every device.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from moeflow.errors import ConfigError


def derive_seed(*keys: object) -> int:
    """A 63-bit seed from a tuple of keys; the same in every process and version of Python."""
    digest = hashlib.blake2b("/".join(map(str, keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_for(*keys: object) -> torch.Generator:
    """A CPU generator seeded by the keys."""
    return torch.Generator().manual_seed(derive_seed(*keys))


def initialize(model: nn.Module, seed: int, prefix: str = "") -> None:
    """Draw all parameters of `model`, in place.

    A module with `init_parameters(generator)` gets a function from keys to generators; any other module that holds
    parameters must have torch's `reset_parameters`, which is run with torch's generator seeded for it.  An attribute
    `drawn_as` names a sibling module whose generators are used instead of the module's own.

    Args:
        model: with parameters on the CPU.
        seed: `run.seed`.
        prefix: global name of `model` itself, when it is a part of a larger one.

    Raises:
        ConfigError: a module holds parameters but tells no way to draw them.
    """
    for name, module in model.named_modules(prefix=prefix):
        initialize_module(module, seed, name)


def initialize_module(module: nn.Module, seed: int, name: str) -> None:
    """Draw the parameters that `module` holds itself, not those of its children; see `initialize`."""
    # Tied parameters that are on different ranks have to be drawn alike.
    sibling = getattr(module, "drawn_as", None)
    if sibling is not None:
        name = ".".join(filter(None, (name.rpartition(".")[0], sibling)))
    draw = getattr(module, "init_parameters", None)
    if draw is not None:
        draw(lambda *keys: generator_for(seed, name, *keys))
    elif any(True for _ in module.parameters(recurse=False)):
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ConfigError(
                f"module {name!r} ({type(module).__name__}) holds parameters but has no reset_parameters()",
                "give it a method reset_parameters() that draws them",
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, name))
            reset()
