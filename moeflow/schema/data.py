"""Data sets: one class an option of the `data` group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from moeflow.schema.fields import option


@dataclass(slots=True)
class DataConfig:
    """What every data set has.  `name` picks the builder in `moeflow.data`."""

    name: str = option("cifar10", "data set")
    source: str = option(
        "auto",
        "auto: real data where found, else see on_missing; synthetic never touches disk or network",
        choices=("auto", "real", "synthetic"),
    )
    root: Optional[str] = option(
        None,
        "folder of the data, which must exist; null looks in $MOEFLOW_DATA, ./data, ~/.cache/moeflow/data",
        path=True,
    )
    on_missing: str = option(
        "synthetic",
        "without data and without a network: train on the synthetic set, or stop",
        choices=("synthetic", "error"),
    )
    download: bool = option(True, "fetch the published archive (checked against its checksum) when data are missing")
    batch_size: int = option(128, "samples of one optimizer step over all ranks, accumulation included", minimum=1)
    eval_batch_size: int = option(500, "samples of one evaluation batch over all ranks", minimum=1)
    num_workers: int = option(0, "processes of each rank that prepare batches (0: the rank itself)", minimum=0)


@dataclass(slots=True)
class CifarData(DataConfig):
    """CIFAR-10 in its published layouts (python pickles or binary), or the drawn set that stands in for it."""

    name: str = option("cifar10", "data set")
    augment: bool = option(True, "random crop and horizontal flip of training images")
    crop_padding: int = option(4, "pixels of padding of the random crop", minimum=0, maximum=31)
    crop_fill: str = option("reflect", "what the padding holds", choices=("reflect", "zero"))
    channels_last: bool = option(False, "hand out images in torch's channels_last memory format")
    train_samples: Optional[int] = option(None, "use only the first n training samples", minimum=1)
    eval_samples: Optional[int] = option(None, "use only the first n test samples", minimum=1)


@dataclass(slots=True)
class TextData(DataConfig):
    """Windows of one text for language models; the last part of the text is held out."""

    name: str = option("text", "data set")
    path: Optional[str] = option(
        None,
        "text file (relative to data.root where that is given); null takes the text of Python's own manual",
        path_under="root",
    )
    level: str = option("char", "one token a character, or a byte", choices=("char", "byte"))
    seq_len: int = option(64, "tokens of a window", minimum=1)
    val_fraction: float = option(0.1, "part of the text, at its end, that is held out", above=0.0, maximum=0.9)
    batch_size: int = option(12, "windows of one optimizer step over all ranks, accumulation included", minimum=1)
    eval_batch_size: int = option(64, "windows of one evaluation batch over all ranks", minimum=1)


DATASETS: dict[str, type[DataConfig]] = {"cifar10": CifarData, "text": TextData}
