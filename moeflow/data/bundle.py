"""What the training loop gets from the data: two data sets, and what is to be said about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from moeflow.data.tokenizer import Tokenizer

Source = Literal["real", "synthetic"]


class Dataset(Protocol):
    """A map-style data set that hands out whole batches."""

    def __len__(self) -> int:
        """Samples of an epoch."""
        ...

    def fetch(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        """Make the batch of some samples: a pure function of its arguments.

        Args:
            indices: int64 [B], each in [0, len).
            epoch: picks the random draws of augmentation and windows.

        Returns:
            "inputs" and "targets" with B as their first dimension, on the CPU.
        """
        ...


@dataclass(frozen=True)
class DataBundle:
    """The data of a run.

    Attributes:
        train: data set of training; its samples vary with the epoch.
        eval: data set of evaluation; its samples do not.
        source: "real", or "synthetic" for data that moeflow made itself.
        name: for lists and trackers, such as "cifar10" or "synthetic-figures".
        origin: where the data come from, for people: a folder, a file, or how they are made.
        notice: lines for the banner at the start of a run, or None when there is nothing to point out.
        fingerprint: equal on two machines exactly when the data are (checked on labels, sizes and samples of the
            content); ranks compare it with one another, and a resumed run with its checkpoint.
        num_classes: of images, else None.
        vocab_size: of text, else None.
        tokenizer: of text, else None.
    """

    train: Dataset
    eval: Dataset
    source: Source
    name: str
    origin: str
    notice: str | None
    fingerprint: str
    num_classes: int | None = None
    vocab_size: int | None = None
    tokenizer: Tokenizer | None = None
