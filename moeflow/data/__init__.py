"""Data sets and loaders.

    build(cfg.data, seed) -> DataBundle(train, eval, ...)
    loader.train_batches(bundle.train, ...), loader.eval_batches(bundle.eval, ...) -> batches on the device

Importing this brings torch; nothing else is done until `build` is called.
"""

from __future__ import annotations

from moeflow.data import images, text
from moeflow.data.bundle import DataBundle, Dataset
from moeflow.errors import ConfigError, did_you_mean
from moeflow.schema.data import DATASETS, CifarData, DataConfig, TextData

__all__ = ["DataBundle", "Dataset", "build"]


def build(cfg: DataConfig, seed: int) -> DataBundle:
    """Find, fetch or make the data that `cfg` names.

    Several processes may call this at once: one of them downloads and unpacks, the others wait for it.

    Args:
        cfg: the `data` section of a run.
        seed: of the run; augmentation and windows are pure functions of (seed, epoch, sample).

    Raises:
        ConfigError: `cfg` names no data set, or asks for what it does not have.
        DataError: files are missing or damaged.
    """
    if isinstance(cfg, CifarData):
        return images.build(cfg, seed)
    if isinstance(cfg, TextData):
        return text.build(cfg, seed)
    raise ConfigError(
        f"data.name={cfg.name} is not a data set that can be built.{did_you_mean(cfg.name, DATASETS)}",
        f"choose one by data=NAME: {', '.join(DATASETS)}",
    )
