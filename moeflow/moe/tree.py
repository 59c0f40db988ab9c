"""Inputs of several tensors: dicts, lists and tuples of them, nested."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

Tree = Any  # a Tensor, or a dict, list or tuple of trees


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in order."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def tree_map(function: Callable[..., Any], first: Tree, *others: Tree) -> Tree:
    """Apply `function` to each tensor of `first` and its counterparts in `others`, which are built alike."""
    if isinstance(first, dict):
        return {key: tree_map(function, value, *(other[key] for other in others)) for key, value in first.items()}
    if isinstance(first, (list, tuple)):
        mapped = [tree_map(function, *values) for values in zip(first, *others, strict=True)]
        return mapped if isinstance(first, list) else tuple(mapped)
    return function(first, *others)


def unflatten(like: Tree, tensors: Iterable[Tensor]) -> Tree:
    """A tree built like `like`, with other tensors in order."""
    remaining = iter(tensors)
    return tree_map(lambda _: next(remaining), like)
