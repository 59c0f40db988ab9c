"""Image classification: CIFAR-10, or the drawn set in its place.

Legend: B images of a batch, N images of a set.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moeflow.data import augment, cifar10, synthetic
from moeflow.data.bundle import DataBundle
from moeflow.data.locate import how_to_get, locate
from moeflow.errors import ConfigError
from moeflow.schema.data import CifarData


class Pixels(Protocol):
    """Where the images of a set come from."""

    labels: Tensor

    def take(self, ids_B: Tensor) -> Tensor:
        """Return the images uint8 [B, 3, 32, 32] of int64 [B]."""
        ...


class StoredPixels:
    """Images held in memory.  They are tensors, so that worker processes share them and do not copy them."""

    def __init__(self, images: Tensor, labels: Tensor):
        """Hold uint8 [N, 3, 32, 32] and int64 [N]."""
        self.images, self.labels = images, labels

    def take(self, ids_B: Tensor) -> Tensor:
        """Return the images uint8 [B, 3, 32, 32] of int64 [B]."""
        return self.images.index_select(0, ids_B)


class DrawnPixels:
    """Images drawn when they are first asked for (about 40 us each), then kept."""

    def __init__(self, num_images: int, train: bool):
        """Prepare the first N images of the training or the test split; none is drawn yet."""
        self.labels = torch.from_numpy(synthetic.labels(np.arange(num_images)))
        self._train = train
        # Pages of it come to life as images are drawn.
        self._images = torch.empty(num_images, 3, synthetic.SIZE, synthetic.SIZE, dtype=torch.uint8)
        self._drawn = torch.zeros(num_images, dtype=torch.bool)

    def __reduce__(self) -> tuple[type[DrawnPixels], tuple[int, bool]]:
        """Worker processes that are sent a copy draw their own images; shared ones would be written by several."""
        return DrawnPixels, (len(self.labels), self._train)

    def take(self, ids_B: Tensor) -> Tensor:
        """Return the images uint8 [B, 3, 32, 32] of int64 [B]."""
        new = ids_B[~self._drawn[ids_B]]
        if len(new):
            # Seed 0 for every run: like CIFAR-10, the set is one and the same whatever the run's seed.
            self._images[new] = torch.from_numpy(synthetic.draw_images(new.numpy(), seed=0, train=self._train))
            self._drawn[new] = True
        return self._images.index_select(0, ids_B)


class ImageDataset:
    """Batches of normalized images, augmented when asked for."""

    def __init__(
        self,
        pixels: Pixels,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        seed: int = 0,
        padding: int | None = None,
        fill: str = "reflect",
        channels_last: bool = False,
    ):
        """Wrap a set of images.

        Args:
            pixels: the images and their labels.
            mean: of each color, on the scale 0 to 1.
            std: of each color, on the same scale.
            seed: of the augmentation.
            padding: pixels of the random crop (0: flips only); None leaves the images as they are.
            fill: see `moeflow.data.augment.crop_and_flip`.
            channels_last: memory format of the batches.
        """
        self.pixels, self.mean, self.std = pixels, mean, std
        self.seed, self.padding, self.fill = seed, padding, fill
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def __len__(self) -> int:
        """Images of the set."""
        return len(self.pixels.labels)

    def fetch(self, indices: Tensor, epoch: int) -> dict[str, Tensor]:
        """Return {"inputs": float32 [B, 3, 32, 32], "targets": int64 [B]}; see `moeflow.data.bundle.Dataset`."""
        images = self.pixels.take(indices)
        if self.padding is not None:
            images = augment.crop_and_flip(
                images, indices, seed=self.seed, epoch=epoch, padding=self.padding, fill=self.fill
            )
        inputs = augment.normalize(images, self.mean, self.std)
        return {
            "inputs": inputs.contiguous(memory_format=self.memory_format),
            "targets": self.pixels.labels[indices],
        }


def build(cfg: CifarData, seed: int) -> DataBundle:
    """Build the data of the `cifar10` option.

    Args:
        cfg: the `data` section.
        seed: of the run: crops and flips.

    Raises:
        DataError: data that were named or demanded are missing or damaged.
        ConfigError: more samples are asked for than there are.
    """
    num_train = _limited("data.train_samples", cfg.train_samples, synthetic.NUM_TRAIN)
    num_test = _limited("data.eval_samples", cfg.eval_samples, synthetic.NUM_TEST)
    if cfg.source == "synthetic":
        return _drawn(cfg, seed, num_train, num_test, reason=None)
    found = locate(cfg)
    if found.folder is None:
        return _drawn(cfg, seed, num_train, num_test, reason=found.reason)
    return _stored(cfg, seed, num_train, num_test, found.folder)


def _limited(key: str, asked: int | None, most: int) -> int:
    if asked is not None and not 0 < asked <= most:
        raise ConfigError(f"{key}={asked} does not lie between 1 and the {most:,} images there are", f"leave {key} out")
    return asked or most


def _stored(cfg: CifarData, seed: int, num_train: int, num_test: int, folder: Path) -> DataBundle:
    train, test = (
        StoredPixels(*map(torch.from_numpy, cifar10.read(folder, train=is_train, limit=limit)))
        for is_train, limit in ((True, num_train), (False, num_test))
    )
    digest = hashlib.sha256()
    for pixels in (train, test):
        digest.update(pixels.labels.numpy().tobytes())
        # one pixel of each image tells two sets apart, and costs nothing
        digest.update(pixels.images[:, :, 16, 16].numpy().tobytes())
    return DataBundle(
        *_datasets(cfg, seed, train, test, cifar10.MEAN, cifar10.STD),
        source="real",
        name="cifar10",
        origin=str(folder.resolve()),
        notice=None,
        fingerprint=f"cifar10:{num_train}+{num_test}:{digest.hexdigest()[:16]}",
        num_classes=cifar10.NUM_CLASSES,
    )


def _drawn(cfg: CifarData, seed: int, num_train: int, num_test: int, reason: str | None) -> DataBundle:
    train, test = DrawnPixels(num_train, train=True), DrawnPixels(num_test, train=False)
    return DataBundle(
        *_datasets(cfg, seed, train, test, synthetic.MEAN, synthetic.STD),
        source="synthetic",
        name="synthetic-figures",
        origin=f"drawn by moeflow: {', '.join(synthetic.CLASSES)}",
        notice=_notice(reason),
        fingerprint=f"figures:{num_train}+{num_test}",
        num_classes=len(synthetic.CLASSES),
    )


def _notice(reason: str | None) -> str:
    """What the banner says about the drawn set."""
    why = (
        "data.source=synthetic was asked for."
        if reason is None
        else f"CIFAR-10 was not found: {reason}.\nTo make this an error instead, pass data.on_missing=error."
    )
    return (
        "SYNTHETIC DATA: these are figures drawn by moeflow, not CIFAR-10; accuracies say nothing about CIFAR-10.\n"
        f"{why}\n"
        f"For the real images: {how_to_get()}."
    )


def _datasets(
    cfg: CifarData, seed: int, train: Pixels, test: Pixels, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[ImageDataset, ImageDataset]:
    """Return the training set (augmented where asked for) and the evaluation set."""
    return (
        ImageDataset(
            train,
            mean=mean,
            std=std,
            seed=seed,
            padding=cfg.crop_padding if cfg.augment else None,
            fill=cfg.crop_fill,
            channels_last=cfg.channels_last,
        ),
        ImageDataset(test, mean=mean, std=std, channels_last=cfg.channels_last),
    )
