"""Ten classes of drawn 32x32 images: what a recipe trains on where there are no real ones.

Each image shows one figure (the class) at a random place, size, angle and color, with a blot and a bar in its way, on a
shaded and noisy ground.  Brightness and color tell nothing about the class, so a linear model learns little, while a
small convolutional network learns it well.

An image is a pure function of (seed, split, index).  Only additions, multiplications, square roots and roundings are
used, which IEEE 754 fixes, so that the pixels are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeflow.data import counter

F32 = NDArray[np.float32]

SIZE = 32
NUM_TRAIN = 50_000
NUM_TEST = 10_000
CLASSES = ("disc", "ring", "square", "frame", "triangle", "plus", "stripes", "checker", "bar", "crescent")

# Mean and deviation of each color over the training images (measured), on the scale 0 to 1.
MEAN = (0.498, 0.498, 0.498)
STD = (0.235, 0.235, 0.235)

_STREAM = 0x5EED
_NUM_ANGLES = 64
# Rounded to 1/4096, so that a last bit of the C library's cosine cannot show.
_COS, _SIN = (
    np.array([round(f(2 * math.pi * i / _NUM_ANGLES) * 4096) / 4096 for i in range(_NUM_ANGLES)], dtype=np.float32)
    for f in (math.cos, math.sin)
)
_NOISE_WORDS = 3 * SIZE * SIZE // 8


def labels(ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Class of each image: index modulo 10, so that any first n are balanced."""
    return ids % len(CLASSES)


def draw_images(ids: NDArray[np.int64], *, seed: int, train: bool) -> NDArray[np.uint8]:
    """Draw images.

    Args:
        ids: indices [B] in the split.
        seed: of the run.
        train: the training split, or the test split.

    Returns:
        uint8 [B, 3, 32, 32].
    """
    dice = _Dice(counter.key(seed, _STREAM, int(train)), ids)
    x, y = _pixel_grid()
    center_x, center_y = dice.real(-6.0, 6.0), dice.real(-6.0, 6.0)
    radius = dice.real(7.0, 12.0)
    along, across = _turned(x - center_x, y - center_y, dice.angle())
    figure = _coverage(_figure(labels(ids), along, across, radius))

    ground = dice.color(50.0, 205.0)
    image = ground + dice.color(-2.0, 2.0) * x[:, None]
    paint = np.empty_like(image)  # one buffer for all that is laid on the ground: large temporaries are what costs here
    _lay(image, dice.color(-2.0, 2.0), y[:, None], paint)
    _lay(image, dice.contrast(40.0, 110.0), figure[:, None], paint)

    blot_x, blot_y = x - dice.real(-14.0, 14.0), y - dice.real(-14.0, 14.0)
    blot = _coverage(_length(blot_x, blot_y) - dice.real(1.5, 4.0))
    _lay(image, dice.contrast(20.0, 80.0), blot[:, None], paint)
    bar = _coverage(np.abs(_turned(x, y, dice.angle())[0] - dice.real(-12.0, 12.0)) - dice.real(0.4, 1.2))
    _lay(image, dice.contrast(20.0, 80.0), bar[:, None], paint)

    _lay(image, dice.real(0.04, 0.25)[:, None], dice.noise(), paint)
    np.clip(image, 0.0, 255.0, out=image)
    return image.astype(np.uint8).reshape(-1, 3, SIZE, SIZE)


def _lay(image: F32, color: F32, amount: F32, paint: F32) -> None:
    """Add color * amount to the image in place, with `paint` as working space of the same shape."""
    np.multiply(color, amount, out=paint)
    image += paint


class _Dice:
    """Random numbers of a batch of images, in the order they are asked for: shapes [B, 1], or [B, 3, 1] by color."""

    def __init__(self, stream_key: int, ids: NDArray[np.int64]):
        self._key, self._ids, self._asked = stream_key, ids, 0

    def _bits(self) -> counter.U64:
        self._asked += 1
        return counter.draw(counter.key(self._key, self._asked), self._ids)

    def real(self, low: float, high: float) -> F32:
        return _scaled(counter.field(self._bits(), 0, 1 << 12), low, high)[:, None]

    def angle(self) -> NDArray[np.int64]:
        return counter.field(self._bits(), 0, _NUM_ANGLES)[:, None]

    def color(self, low: float, high: float) -> F32:
        bits = self._bits()
        return _scaled(np.stack([counter.field(bits, 16 * c, 1 << 12) for c in range(3)], axis=1), low, high)[
            :, :, None
        ]

    def contrast(self, low: float, high: float) -> F32:
        """Color differences of a size between low and high, each of either sign."""
        difference = self.color(low - high, high - low)
        return difference + np.where(difference < 0, -low, low).astype(np.float32)

    def noise(self) -> F32:
        """Independent noise of each pixel, -128 to 127: [B, 3, 1024]."""
        words = self._ids[:, None] * _NOISE_WORDS + np.arange(_NOISE_WORDS)
        self._asked += 1
        bits = counter.draw(counter.key(self._key, self._asked), words).astype("<u8", copy=False)
        return bits.view(np.int8).reshape(-1, 3, SIZE * SIZE).astype(np.float32)


def _scaled(twelve_bits: NDArray[np.int64], low: float, high: float) -> F32:
    return twelve_bits.astype(np.float32) * np.float32((high - low) / 4096) + np.float32(low)


def _pixel_grid() -> tuple[F32, F32]:
    """Coordinates of the pixels about the center: two [1, 1024]."""
    ticks = np.arange(SIZE, dtype=np.float32) - np.float32((SIZE - 1) / 2)
    return np.tile(ticks, SIZE)[None], np.repeat(ticks, SIZE)[None]


def _turned(x: F32, y: F32, angle: NDArray[np.int64]) -> tuple[F32, F32]:
    cos, sin = _COS[angle], _SIN[angle]
    return x * cos + y * sin, y * cos - x * sin


def _length(x: F32, y: F32) -> F32:
    return np.sqrt(x * x + y * y)


def _coverage(distance: F32) -> F32:
    """Part of each pixel that a figure covers, from the signed distance to its edge (negative inside)."""
    return np.clip(np.float32(0.5) - distance, 0.0, 1.0)


def _figure(classes: NDArray[np.int64], p: F32, q: F32, radius: F32) -> F32:
    """Signed distance in pixels to the figure of each image, in its own turned coordinates p, q [B, 1024]."""
    distance = np.empty_like(p)
    for number, shape in enumerate(_SHAPES):
        rows = np.nonzero(classes == number)[0]
        if rows.size:
            distance[rows] = shape(p[rows], q[rows], radius[rows])
    return distance


def _square(p: F32, q: F32, half: Any) -> F32:
    return np.maximum(np.abs(p), np.abs(q)) - half


def _box(p: F32, q: F32, half_p: Any, half_q: Any) -> F32:
    return np.maximum(np.abs(p) - half_p, np.abs(q) - half_q)


def _waves(p: F32, period: Any) -> F32:
    """Distance to the edges of stripes of equal width: negative in every other one."""
    phase = p / period
    return (np.abs(phase - np.floor(phase) - np.float32(0.5)) - np.float32(0.25)) * period


def _disc(p: F32, q: F32, r: F32) -> F32:
    return _length(p, q) - r * 0.9


def _ring(p: F32, q: F32, r: F32) -> F32:
    return np.abs(_length(p, q) - r * 0.7) - r * 0.2


def _solid_square(p: F32, q: F32, r: F32) -> F32:
    return _square(p, q, r * 0.8)


def _frame(p: F32, q: F32, r: F32) -> F32:
    return np.abs(_square(p, q, r * 0.65)) - r * 0.2


def _triangle(p: F32, q: F32, r: F32) -> F32:
    return np.maximum(-q, np.abs(p) * 0.866 + q * 0.5) - r * 0.55


def _plus(p: F32, q: F32, r: F32) -> F32:
    return np.minimum(_box(p, q, r, r * 0.28), _box(p, q, r * 0.28, r))


def _stripes(p: F32, q: F32, r: F32) -> F32:
    return np.maximum(_length(p, q) - r, _waves(p, r * 0.55))


def _checker(p: F32, q: F32, r: F32) -> F32:
    across, along = _waves(p, r * 0.8), _waves(q, r * 0.8)
    return np.maximum(_length(p, q) - r, np.minimum(np.maximum(across, along), np.maximum(-across, -along)))


def _bar(p: F32, q: F32, r: F32) -> F32:
    return _box(p, q, r, r * 0.35)


def _crescent(p: F32, q: F32, r: F32) -> F32:
    return np.maximum(_length(p, q) - r * 0.9, r * 0.7 - _length(p - r * 0.45, q))


_SHAPES: tuple[Callable[[F32, F32, F32], F32], ...] = (
    _disc,
    _ring,
    _solid_square,
    _frame,
    _triangle,
    _plus,
    _stripes,
    _checker,
    _bar,
    _crescent,
)
