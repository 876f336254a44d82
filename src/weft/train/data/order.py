"""A shuffled order that needs no memory: a keyed permutation of 0 .. count-1.

A four-round Feistel network permutes the numbers of 2k bits. Results outside 0 .. count-1 go through the network again
until they are inside ("cycle walking", Black and Rogaway 2002). Any rank can compute any part of the order without
computing the rest. The order does not depend on the version of any library.
"""

import numpy as np

_ROUNDS = 4


def shuffled(positions: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the numbers at `positions` of an endless sequence of shuffles of 0 .. count-1.

    `positions`: non-negative integers. Position p is in epoch p // `count`. Each epoch has its own permutation of
    0 .. count-1. `seed` determines all epochs. The result is int64 and has the shape of `positions`.
    """
    positions = np.asarray(positions, dtype=np.uint64)
    epochs, places = np.divmod(positions, np.uint64(count))
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    with np.errstate(over="ignore"):
        keys = _mix(_mix(np.full_like(epochs, seed) + np.uint64(0x9E3779B97F4A7C15)) ^ epochs)
        result = _feistel(places, keys, half_bits)
        outside = result >= count
        while outside.any():
            result[outside] = _feistel(result[outside], keys[outside], half_bits)
            outside = result >= count
    return result.astype(np.int64)


def _feistel(values: np.ndarray, keys: np.ndarray, half_bits: int) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_ in range(_ROUNDS):
        left, right = right, left ^ (_mix(keys + _mix(right + np.uint64((round_ + 1) << 56))) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014): every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
