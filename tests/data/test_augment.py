"""Crop and flip against a slow loop that pads, cuts and mirrors one image at a time with numpy."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from moeflow.data import augment, counter


def slow(images: np.ndarray, ids: list[int], seed: int, epoch: int, padding: int, fill: str) -> np.ndarray:
    out = []
    for image, number in zip(images, ids, strict=True):
        bits = counter.draw(counter.key(seed, 0xA46, epoch), np.array([number]))
        down = int(counter.field(bits, 0, 2 * padding + 1)[0])
        right = int(counter.field(bits, 16, 2 * padding + 1)[0])
        flip = bool(counter.field(bits, 32, 2)[0])
        mode = {"reflect": "reflect", "zero": "constant"}[fill]
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)), mode=mode)
        if flip:
            # The gather mirrors the window it would have taken: shift by `right` counts in the flipped image.
            padded = padded[:, :, ::-1]
            right = 2 * padding - right
        out.append(padded[:, down : down + 32, right : right + 32])
    return np.stack(out)


@pytest.mark.parametrize("fill", ["reflect", "zero"])
@pytest.mark.parametrize("padding", [0, 1, 4, 31])
def test_equals_the_slow_loop(fill: str, padding: int):
    rng = np.random.default_rng(0)
    images = rng.integers(1, 256, (200, 3, 32, 32), dtype=np.uint8)
    ids = rng.integers(0, 50_000, 200)
    fast = augment.crop_and_flip(
        torch.from_numpy(images), torch.from_numpy(ids), seed=3, epoch=5, padding=padding, fill=fill
    )
    assert fast.dtype == torch.uint8
    np.testing.assert_array_equal(fast.numpy(), slow(images, ids.tolist(), 3, 5, padding, fill))


def test_an_image_does_not_depend_on_its_batch():
    rng = np.random.default_rng(1)
    images = torch.from_numpy(rng.integers(0, 256, (64, 3, 32, 32), dtype=np.uint8))
    ids = torch.from_numpy(rng.permutation(50_000)[:64])
    whole = augment.crop_and_flip(images, ids, seed=0, epoch=2, padding=4)
    order = torch.from_numpy(rng.permutation(64))
    again = augment.crop_and_flip(images[order], ids[order], seed=0, epoch=2, padding=4)
    assert torch.equal(whole[order], again)
    single = augment.crop_and_flip(images[9:10], ids[9:10], seed=0, epoch=2, padding=4)
    assert torch.equal(whole[9:10], single)


def test_every_shift_and_both_sides_occur_equally_often():
    # An image whose pixels tell where they came from.
    image = torch.arange(1024).reshape(1, 1, 32, 32).expand(5_000, 1, 32, 32)
    out = augment.crop_and_flip(image, torch.arange(5_000), seed=0, epoch=0, padding=4, fill="zero")
    center = out[:, 0, 16, 16]  # never padding
    row, column = center // 32, center % 32
    assert set((row - 16).tolist()) == set(range(-4, 5))
    flipped = out[:, 0, 16, 17] < center
    assert abs(flipped.float().mean() - 0.5) < 0.035
    columns = torch.where(flipped, 15 - column, column - 16)
    for shifts in (row - 16, columns):
        counts = torch.bincount(shifts + 4, minlength=9)
        assert (counts - 5_000 / 9).abs().max() < 5 * (5_000 / 9) ** 0.5


def test_draws_change_with_seed_and_epoch():
    images = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (100, 3, 32, 32), dtype=np.uint8))
    ids = torch.arange(100)
    base = augment.crop_and_flip(images, ids, seed=0, epoch=0, padding=4)
    for seed, epoch in [(1, 0), (0, 1)]:
        other = augment.crop_and_flip(images, ids, seed=seed, epoch=epoch, padding=4)
        same = (base == other).flatten(1).all(1).float().mean()
        assert same < 0.1  # 1/162 of the draws agree by chance


def test_normalize():
    images = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8))
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.25, 0.3)
    out = augment.normalize(images, mean, std)
    assert out.dtype == torch.float32
    expected = (images.numpy() / 255.0 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_fast_enough():
    """128 images take about 0.8 ms of one core; the bound leaves room for a slow one."""
    images = torch.from_numpy(np.random.default_rng(4).integers(0, 256, (128, 3, 32, 32), dtype=np.uint8))
    ids = torch.arange(128)
    best = float("inf")
    for _ in range(30):
        started = time.thread_time()
        out = augment.crop_and_flip(images, ids, seed=0, epoch=0, padding=4)
        augment.normalize(out, (0.5,) * 3, (0.2,) * 3)
        best = min(best, time.thread_time() - started)
    assert best < 3e-3
