"""Which kernel DeepGEMM's FP8 GEMMs take on Hopper: the tile that its host code chooses for M, N
and K, so that those that a range of M can reach are known before any is compiled.

Written from a description of the library's heuristic for SM90, and read beside it
(deepseek-ai/DeepGEMM csrc/jit_kernels/heuristics/sm90.hpp). DeepGEMM 0.1.5 on an H200 compiled the
42 dense kernels that this foretells for nine shapes and M = 1 to 8192, and no other; of grouped and
batched ones 14 that were tried. A later release gives a masked GEMM of few tokens no cluster: what
is foretold is checked against what the library compiles (``deep_gemm_compiler.py``).
"""

from __future__ import annotations

import functools
import struct
from typing import Literal, NamedTuple

# One matrix; rows of several groups behind each other, in blocks of 128; [g, m_max, k] of which
# each group uses some rows; one product a batch.
Kind = Literal["dense", "contiguous", "masked", "batched"]

BLOCK_K = 128
# Where a choice can change: at 16 and 32 tokens, and each 64.
FIRST_OF_TILE, TILE = (1, 17, 33), 64
_SHARED_BYTES = 232448  # that a CTA of Hopper can have
_L1_BYTES, _L2_BYTES, _L2_LIMIT = 128, 64, 6153  # bytes a cycle: of an SM, of an SM, of the L2
_CLUSTERS = ((1, 1), (1, 2), (2, 1))  # CTAs along M and N
_NEVER = 2**63 - 1


class Tile(NamedTuple):
    """The compile-time parameters that depend on M, N and K."""

    block_m: int
    block_n: int
    stages: int
    cluster_m: int
    cluster_n: int

    def __str__(self) -> str:
        size = f"{self.block_m}x{self.block_n}, {self.stages} stages"
        return f"{size}, cluster {self.cluster_m}x{self.cluster_n}"


def choose(kind: Kind, m: int, n: int, k: int, groups: int, multiprocessors: int) -> Tile:
    """The tile of a GEMM: the first of the least cost.

    Args:
        m: tokens; of ``masked`` those that are expected of a group.
        groups: of ``masked`` and ``batched``; 1 for the others.
        multiprocessors: that the library may use, an even number.
    """
    # All that M decides: how many tiles there are along it, and whether small ones are candidates.
    rows = 16 if m <= 16 else 32 if m <= 32 else -(-m // TILE) * TILE
    return _choose(kind, rows, n, k, groups, multiprocessors)


@functools.lru_cache(maxsize=65536)
def _choose(kind: Kind, m: int, n: int, k: int, groups: int, multiprocessors: int) -> Tile:
    best: Tile | None = None
    least = _NEVER
    for tile in _candidates(kind, min(m, 33), k, multiprocessors):
        along_n = -(-n // tile.block_n)
        cluster = tile.cluster_m * tile.cluster_n
        if kind == "masked" and along_n % cluster:
            continue
        blocks = -(-m // tile.block_m) * along_n * groups
        cost = _cycles(tile, blocks, k, multiprocessors)
        if best is None or cost < least:
            best, least = tile, cost
    assert best is not None  # 64 x 16 always fits
    return best


@functools.lru_cache(maxsize=4096)
def _candidates(kind: Kind, m: int, k: int, multiprocessors: int) -> tuple[Tile, ...]:
    found = []
    for cluster_m, cluster_n in _CLUSTERS[: 1 if kind == "batched" else None]:
        if multiprocessors % (cluster_m * cluster_n):
            continue
        for block_m in _rows(kind, m):
            for block_n in range(16, 193, 16):
                past = block_n - BLOCK_K
                if past > 0 and block_n % past and BLOCK_K % past:
                    continue
                if block_m > 128 and block_n > 128:
                    continue
                stages = _stages(block_m, block_n, k)
                if stages >= (4 if block_m * block_n < 128 * 192 else 3):
                    found.append(Tile(block_m, block_n, stages, cluster_m, cluster_n))
    return tuple(found)


def _rows(kind: Kind, m: int) -> tuple[int, ...]:
    """The candidates for block_m, in the library's order, which decides between equal costs."""
    if kind == "contiguous":
        return (128,)
    if kind == "masked":
        return (64, 128)
    return (64, 128, *((16,) if m <= 16 else ()), *((32,) if m <= 32 else ()), 256)


def _stages(block_m: int, block_n: int, k: int) -> int:
    """How often a tile of both operands fits into shared memory, beside the result and scales."""
    scales = 4 * -(-k // BLOCK_K) * (1 if BLOCK_K % block_n == 0 else 2)
    beside = _align(2 * block_m * block_n, 1024) + 256 + _align(scales, 8)
    each = BLOCK_K * (block_m + block_n) + _align(4 * block_m, 128)
    return min(16, (_SHARED_BYTES - beside) // each)


def _cycles(tile: Tile, blocks: int, k: int, multiprocessors: int) -> int:
    block_m, block_n, _, cluster_m, cluster_n = tile
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
