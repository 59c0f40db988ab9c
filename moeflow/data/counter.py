"""Random numbers as a pure function of counters.

A draw belongs to (seed, stream, epoch, sample) and to nothing else: not to the rank that asks, nor to what was drawn
before.  So augmentation and windows are the same on any layout, with any number of workers, and after any resume,
without state to save.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(value: int) -> int:
    """Scramble 64 bits: the output function of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195)."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key(*parts: int) -> int:
    """Fold integers (seed, stream, epoch, ...) into one 64-bit key; the order counts."""
    folded = 0
    for part in parts:
        folded = mix(folded ^ (part & _MASK))
    return folded


def draw(stream_key: int, counters: NDArray[Any]) -> U64:
    """Draw 64 random bits for each counter.

    Args:
        stream_key: from `key`.
        counters: integers of any shape.

    Returns:
        uint64 of the shape of `counters`; element i is mix(stream_key xor counters[i]).
    """
    bits = counters.astype(np.uint64)  # a copy, so that the rest can work in place
    bits ^= np.uint64(stream_key)
    with np.errstate(over="ignore"):
        bits += np.uint64(_GOLDEN)
        bits ^= bits >> np.uint64(30)
        bits *= np.uint64(0xBF58476D1CE4E5B9)
        bits ^= bits >> np.uint64(27)
        bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def field(bits: U64, shift: int, bound: int) -> NDArray[np.int64]:
    """Cut a number in [0, bound) out of 16 of the 64 bits, starting at `shift`.

    Fields at shifts 16 apart are independent.  The bias against a uniform draw is below bound / 65536.
    """
    part = (bits >> np.uint64(shift)) & np.uint64(0xFFFF)
    return ((part * np.uint64(bound)) >> np.uint64(16)).astype(np.int64)


def below(bits: U64, bound: int) -> NDArray[np.int64]:
    """Reduce all 64 bits to a number in [0, bound), with a bias below bound / 2**32 (bound up to 2**32)."""
    return (((bits >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)
