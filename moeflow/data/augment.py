"""Crop and flip of a whole batch of images as one gather, and normalization.

Legend: B images, C channels, H rows, W columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moeflow.data import counter

# Keeps these draws apart from those of other users of the same seed.
_STREAM = 0xA46


def crop_and_flip(
    images_BCHW: Tensor, ids_B: Tensor, *, seed: int, epoch: int, padding: int, fill: str = "reflect"
) -> Tensor:
    """Shift every image by up to `padding` pixels each way, and mirror half of them.

    This is the usual "pad, crop at random, flip at random".  Each image's draw is a pure function of (seed, epoch, its
    id), see `moeflow.data.counter`.

    Args:
        images_BCHW: any dtype.
        ids_B: int64, the images' numbers in the data set.
        seed: of the run.
        epoch: of the batch.
        padding: pixels of padding at each edge, below H and W.
        fill: what the padding holds: "reflect" (mirrored about the edge pixel) or "zero" (black).

    Returns:
        New images of the same shape and dtype.
    """
    num_images, num_channels, height, width = images_BCHW.shape
    bits = counter.draw(counter.key(seed, _STREAM, epoch), ids_B.numpy())
    down_B = torch.from_numpy(counter.field(bits, 0, 2 * padding + 1)) - padding
    right_B = torch.from_numpy(counter.field(bits, 16, 2 * padding + 1)) - padding
    flip_B = torch.from_numpy(counter.field(bits, 32, 2)).bool()

    columns = torch.arange(width)
    row_BH = torch.arange(height) + down_B[:, None]
    column_BW = torch.where(flip_B[:, None], width - 1 - columns, columns) + right_B[:, None]
    source_BHW = _reflect(row_BH, height)[:, :, None] * width + _reflect(column_BW, width)[:, None, :]
    flat = (num_images, num_channels, height * width)
    # The index is expanded over the channels without being copied.
    out = torch.gather(images_BCHW.reshape(flat), 2, source_BHW.reshape(num_images, 1, -1).expand(flat)).reshape(
        images_BCHW.shape
    )
    if fill == "zero":
        inside_BHW = _inside(row_BH, height)[:, :, None] & _inside(column_BW, width)[:, None, :]
        out.mul_(inside_BHW[:, None].to(out.dtype))
    return out


def normalize(images_BCHW: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Turn uint8 pixels into float32 of zero mean and unit variance.

    Args:
        images_BCHW: uint8.
        mean: of each channel, on the scale 0 to 1.
        std: of each channel, on the same scale.

    Returns:
        float32 [B, C, H, W], contiguous: (pixel / 255 - mean) / std.
    """
    shift = torch.tensor(mean).mul_(255).view(1, -1, 1, 1)
    scale = torch.tensor(std).mul_(255).reciprocal_().view(1, -1, 1, 1)
    return images_BCHW.to(torch.float32).sub_(shift).mul_(scale)


def _reflect(position: Tensor, size: int) -> Tensor:
    """Mirror positions outside [0, size) about the first and the last pixel."""
    position = position.abs()
    return torch.where(position >= size, 2 * (size - 1) - position, position)


def _inside(position: Tensor, size: int) -> Tensor:
    return (position >= 0) & (position < size)
