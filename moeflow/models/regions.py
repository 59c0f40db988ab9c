"""How a model tells which of its modules can be cut by columns and rows, without knowing of ranks.

A model that tensor parallelism can cut has a method `tensor_regions()` returning these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Set on a leaf module inside a region that is not cut itself: each rank's gradient is that of its own part of the work.
PARTIAL = "gradient_is_partial"


@dataclass(frozen=True)
class Region:
    """A module whose computation can be cut: first by columns, at the end by rows, with a sum at its output.

    Attributes:
        module: name of the module.
        columns: names, inside it, of the nn.Linear modules cut along their outputs.
        rows: names of those cut along their inputs (they have no bias: it would be added once for each rank).
        divides: configuration key -> count that the number of ranks has to divide.
    """

    module: str
    columns: tuple[str, ...]
    rows: tuple[str, ...] = ()
    divides: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class VocabularyRegion:
    """An embedding, or the layer that makes logits, cut along the vocabulary (not necessarily evenly).

    Attributes:
        module: name of the module; its `weight` is [vocabulary, D].
        kind: "embedding" or "logits".
        size: vocabulary.
    """

    module: str
    kind: str
    size: int
