"""The counter-based generator: the published algorithm, and draws that are uniform and unrelated."""

from __future__ import annotations

import numpy as np
import pytest

from moeflow.data import counter


def splitmix64_stream(seed: int, length: int) -> list[int]:
    """The generator as its authors state it in C: a state that grows by the golden ratio, and three scrambles."""
    out = []
    for _ in range(length):
        seed = (seed + 0x9E3779B97F4A7C15) % 2**64
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        out.append(z ^ (z >> 31))
    return out


def test_mix_is_splitmix64():
    # First outputs of the reference implementation for the seed 1234567.
    assert splitmix64_stream(1234567, 2) == [6457827717110365317, 3203168211198807973]
    assert counter.mix(1234567) == 6457827717110365317
    assert counter.mix(1234567 + 0x9E3779B97F4A7C15) == 3203168211198807973


def test_draw_is_mix_of_each_counter():
    counters = np.array([[0, 1, 2], [2**40, 2**62, 59_999]])
    stream = counter.key(3, 5)
    expected = [[counter.mix(stream ^ int(c)) for c in row] for row in counters]
    assert counter.draw(stream, counters).tolist() == expected
    assert counters.tolist() == [[0, 1, 2], [2**40, 2**62, 59_999]]  # the argument is left alone


def test_key_depends_on_each_part_and_on_their_order():
    keys = [counter.key(*parts) for parts in [(0,), (0, 0), (1, 0), (0, 1), (1,), (-1, 0), (2**64, 1, 0)]]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("bound", [2, 9, 64, 4096])
def test_fields_are_uniform_and_independent(bound: int):
    bits = counter.draw(counter.key(1, 2, 3), np.arange(200_000))
    first, second = counter.field(bits, 0, bound), counter.field(bits, 16, bound)
    for values in (first, second):
        assert values.min() == 0
        assert values.max() == bound - 1
        counts = np.bincount(values, minlength=bound)
        chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert chi2 < bound - 1 + 6 * np.sqrt(2 * bound)  # six deviations of the chi-square law
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.012  # 5 / sqrt(n)


def test_neighboring_seeds_and_epochs_are_unrelated():
    ids = np.arange(100_000)
    base = counter.below(counter.draw(counter.key(0, 9, 0), ids), 1 << 30)
    for seed, epoch in [(1, 0), (0, 1), (1, 1)]:
        other = counter.below(counter.draw(counter.key(seed, 9, epoch), ids), 1 << 30)
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.016


def test_below_covers_its_range():
    bits = counter.draw(counter.key(4), np.arange(50_000))
    values = counter.below(bits, 1_003_790)
    assert values.min() >= 0
    assert values.max() < 1_003_790
    assert abs(values.mean() / 1_003_790 - 0.5) < 0.01
    assert counter.below(np.array([2**64 - 1], dtype=np.uint64), 7).tolist() == [6]
