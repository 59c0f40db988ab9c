"""The drawn images: one and the same everywhere, balanced, and hard for a linear model only."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from moeflow.data import synthetic


def test_pixels_are_the_same_on_every_machine():
    """The arithmetic is exact, so a digest can be kept; it changes only when the drawing does."""
    ids = np.r_[0:64, 49_990:50_000]
    images = synthetic.draw_images(ids, seed=0, train=True)
    assert (images.dtype, images.shape) == (np.uint8, (74, 3, 32, 32))
    assert hashlib.sha256(images.tobytes()).hexdigest()[:16] == "2377d618bb56a538"


def test_an_image_depends_on_seed_split_and_index_alone():
    ids = np.arange(300)
    whole = synthetic.draw_images(ids, seed=0, train=True)
    order = np.random.default_rng(0).permutation(300)
    np.testing.assert_array_equal(synthetic.draw_images(order, seed=0, train=True), whole[order])
    np.testing.assert_array_equal(synthetic.draw_images(np.array([17]), seed=0, train=True), whole[17:18])
    for seed, train in ((1, True), (0, False)):
        other = synthetic.draw_images(ids, seed=seed, train=train)
        assert (other == whole).mean() < 0.02
    assert len(np.unique(whole.reshape(300, -1), axis=0)) == 300


def test_first_n_are_balanced():
    assert np.bincount(synthetic.labels(np.arange(1000))).tolist() == [100] * 10
    assert len(synthetic.CLASSES) == len(synthetic._SHAPES) == 10


def test_constants_of_normalization():
    images = synthetic.draw_images(np.arange(0, 50_000, 25), seed=0, train=True) / 255
    np.testing.assert_allclose(images.mean((0, 2, 3)), synthetic.MEAN, atol=0.01)
    np.testing.assert_allclose(images.std((0, 2, 3)), synthetic.STD, atol=0.01)


def arrays(num_train: int) -> tuple[torch.Tensor, ...]:
    out: list[torch.Tensor] = []
    for count, train in ((num_train, True), (2_000, False)):
        ids = np.arange(count)
        images = torch.from_numpy(synthetic.draw_images(ids, seed=0, train=train)).float()
        out += [(images / 255 - 0.5) / 0.22, torch.from_numpy(synthetic.labels(ids))]
    return tuple(out)


def test_a_linear_model_learns_little():
    """Ridge regression onto the classes, in closed form: the best that a linear model can do, near enough."""
    train, targets, test, answers = arrays(6_000)
    x = train.flatten(1).double()
    x = x[:, ::3]  # every third value keeps the system small and well determined
    gram = x.T @ x + 1e3 * torch.eye(x.shape[1], dtype=torch.float64)
    weights = torch.linalg.solve(gram, x.T @ (nn.functional.one_hot(targets).double() - 0.1))
    accuracy = ((test.flatten(1).double()[:, ::3] @ weights).argmax(1) == answers).double().mean()
    assert accuracy < 0.25


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_convolutional_network_learns_it():
    """68 thousand parameters: about 70 % after 300 steps (30 s of one core), near 90 % after a minute."""
    torch.manual_seed(0)
    train, targets, test, answers = arrays(20_000)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 24), (24, 48), (48, 96)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
    layers[-1] = nn.AvgPool2d(2)
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 16, 10)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    for _ in range(300):
        rows = torch.randint(0, len(train), (128,))
        loss = cross_entropy(net(train[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        accuracy = (net(test).argmax(1) == answers).float().mean()
    assert 0.5 < accuracy < 0.9
