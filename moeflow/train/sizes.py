"""Sizes of the model that the data decide."""

from __future__ import annotations

from moeflow import data
from moeflow.schema import RunConfig


def fill_vocabulary(config: RunConfig) -> None:
    """Set `model.vocab_size` to the data's where it was left null; the data are built for that alone.

    Raises:
        DataError: the data are missing or damaged.
    """
    if getattr(config.model, "vocab_size", 0) is None:
        config.model.vocab_size = data.build(config.data, config.run.seed).vocab_size  # type: ignore[attr-defined]
