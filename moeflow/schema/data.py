"""Data sets: one class an option of the `data` group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from moeflow.schema.fields import option


@dataclass(slots=True)
class DataConfig:
    """What every data set has."""

    name: str = option("cifar10", "data set")
    source: str = option(
        "auto", "auto: real data where found, else see on_missing; synthetic never touches disk or network",
        choices=("auto", "real", "synthetic"),
    )
    root: Optional[str] = option(None, "folder of the data; null looks in the usual places (see docs)")
    on_missing: str = option(
        "synthetic", "without data and without a network: train on the synthetic set, or stop",
        choices=("synthetic", "error"),
    )
    download: bool = option(True, "fetch the published archive (checked against its checksum) when data are missing")
    batch_size: int = option(128, "samples of one optimizer step over all ranks, accumulation included", minimum=1)
    eval_batch_size: int = option(500, "samples of one evaluation batch over all ranks", minimum=1)


@dataclass(slots=True)
class CifarData(DataConfig):
    """CIFAR-10 in its published layouts (python pickles or binary)."""

    name: str = option("cifar10", "data set")
    augment: bool = option(True, "random crop and horizontal flip of training images")
    crop_padding: int = option(4, "pixels of padding of the random crop", minimum=0)
    train_samples: Optional[int] = option(None, "use only the first n training samples", minimum=1)
    eval_samples: Optional[int] = option(None, "use only the first n test samples", minimum=1)
