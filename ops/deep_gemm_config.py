"""Which kernel DeepGEMM's dense FP8 GEMM takes on Hopper: the tile that its host code chooses for
M, N and K, so that those that a range of M can reach are known before any is compiled.

Written from a description of the library's heuristic for SM90; DeepGEMM 0.1.5 and 2.8.2 choose
alike. What it says is checked against what the library compiles (``deep_gemm_compiler.py``).
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

BLOCK_K = 128
_SHARED_BYTES = 232448  # that a CTA of Hopper can have
_L1_BYTES, _L2_BYTES, _L2_LIMIT = 128, 64, 6153  # bytes a cycle: of an SM, of an SM, of the L2
_CLUSTERS = ((1, 1), (1, 2), (2, 1))  # CTAs along M and N
_NEVER = float("inf")


class Tile(NamedTuple):
    """The compile-time parameters that depend on M, N and K."""

    block_m: int
    block_n: int
    stages: int
    cluster_m: int
    cluster_n: int


@functools.lru_cache(maxsize=65536)
def choose(m: int, n: int, k: int, multiprocessors: int) -> Tile:
    """The tile of a GEMM of ``m`` tokens: the first of the least cost.

    Args:
        multiprocessors: that the library may use, an even number.
    """
    # All that M decides: how many tiles there are along it, and whether small ones are candidates.
    tiles = -(-m // 64)
    return _choose(16 if m <= 16 else 32 if m <= 32 else 64 * tiles, n, k, multiprocessors)


@functools.lru_cache(maxsize=65536)
def _choose(m: int, n: int, k: int, multiprocessors: int) -> Tile:
    best: Tile | None = None
    least = _NEVER
    for tile in _tiles(m, k, multiprocessors):
        cost = _cycles(tile, m, n, k, multiprocessors)
        if best is None or cost < least:
            best, least = tile, cost
    assert best is not None  # 64 x 16 always fits
    return best


@functools.lru_cache(maxsize=4096)
def _candidates(small: int, k: int, multiprocessors: int) -> tuple[Tile, ...]:
    found = []
    rows = (64, 128, *((16,) if small <= 16 else ()), *((32,) if small <= 32 else ()), 256)
    for cluster_m, cluster_n in _CLUSTERS:
        if multiprocessors % (cluster_m * cluster_n):
            continue
        for block_m in rows:
            for block_n in range(16, 193, 16):
                past = block_n - BLOCK_K
                if past > 0 and block_n % past and BLOCK_K % past:
                    continue
                if block_m > 128 and block_n > 128:
                    continue
                stages = _stages(block_m, block_n, k)
                if stages < (4 if block_m * block_n < 128 * 192 else 3):
                    continue
                found.append(Tile(block_m, block_n, stages, cluster_m, cluster_n))
    return tuple(found)


def _tiles(m: int, k: int, multiprocessors: int) -> tuple[Tile, ...]:
    return _candidates(min(m, 33), k, multiprocessors)


def _stages(block_m: int, block_n: int, k: int) -> int:
    """How often a tile of both operands fits into shared memory, beside the result and scales."""
    scales = 4 * -(-k // BLOCK_K) * (1 if BLOCK_K % block_n == 0 else 2)
    beside = _align(2 * block_m * block_n, 1024) + 256 + _align(scales, 8)
    each = BLOCK_K * (block_m + block_n) + _align(4 * block_m, 128)
    return min(16, (_SHARED_BYTES - beside) // each)


def _cycles(tile: Tile, m: int, n: int, k: int, multiprocessors: int) -> float:
    block_m, block_n, _, cluster_m, cluster_n = tile
    blocks = -(-m // block_m) * -(-n // block_n)
    waves = -(-blocks // multiprocessors)
    if cluster_m * cluster_n > 1 and waves <= 1:
        return _NEVER
    output = 2 * block_m * block_n
    l2_bytes = k * (block_m // cluster_n + block_n // cluster_m) + output
    l1_bytes = k * (block_m + block_n) + k * (max(64, block_m) + block_n) + 2 * output
    l2 = l2_bytes * blocks // min(_L2_BYTES * multiprocessors, _L2_LIMIT)
    l1 = l1_bytes * blocks // (_L1_BYTES * multiprocessors)
    # In float32, as the library: costs that differ by less are equal, and the first tile wins.
    return int(_float32(_float32(max(l1, l2)) / _float32(blocks / (waves * multiprocessors))))


def _float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def _align(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
