"""The tiles that DeepGEMM chooses on Hopper, against what it was seen to compile."""

from __future__ import annotations

import itertools

import pytest

from compile_ext.ops.deep_gemm_config import FIRST_OF_TILE, TILE, Kind, Tile, choose

MULTIPROCESSORS = 132
# N, K -> the first M of each kernel that M = 1 to 16384 reach, as a compiled copy of the library's
# own function gave them, and as sweeps on an H200 confirm.
FIRSTS = {
    (576, 7168): (
        1, 17, 33, 193, 449, 705, 897, 1025, 1409, 1665, 1729, 1857, 2113, 2817, 3329, 4225, 5633,
        6657, 8449, 11265,
    ),
    (2112, 7168): (
        1, 17, 33, 65, 129, 193, 257, 385, 449, 513, 577, 769, 833, 897, 1025, 1153, 1537, 1665,
        1793, 1921, 2177, 2305, 3073, 3329,
    ),
    (24576, 1536): (1, 17, 33, 65, 129, 385, 641),
    (32768, 512): (1, 17, 33, 65, 129, 257),
    (7168, 16384): (1, 17, 33, 65, 129, 193, 257, 321, 385, 513, 641, 769, 1537),
    (4096, 7168): (
        1, 17, 33, 65, 129, 193, 257, 321, 385, 449, 513, 641, 769, 897, 1025, 1153, 1281, 1537,
        1793,
    ),
    (7168, 2048): (1, 17, 33, 65, 129, 193, 257, 321, 385, 513, 641, 769, 1537),
    (21504, 5376): (1, 17, 33, 65, 129, 385, 513),
    (5376, 21504): (1, 17, 33, 65, 129, 193, 257, 321, 385, 513, 641, 769, 897, 1153, 1281),
}  # fmt: skip


def dense(m: int, n: int, k: int) -> Tile:
    return choose("dense", m, n, k, 1, MULTIPROCESSORS)


def tokens(high: int) -> list[int]:
    return sorted({*FIRST_OF_TILE, *range(1, high + 1, TILE)})


@pytest.mark.parametrize("shape", FIRSTS, ids=str)
def test_the_kernels_of_a_shape(shape: tuple[int, int]) -> None:
    first: dict[Tile, int] = {}
    for m in tokens(16384):
        first.setdefault(dense(m, *shape), m)
    assert tuple(first.values()) == FIRSTS[shape]


def test_shapes_share_kernels() -> None:
    found = {dense(m, *shape) for shape in FIRSTS for m in tokens(8192)}
    assert len(found) == 42  # of 112 by shape


@pytest.mark.parametrize("shape", [(576, 7168), (2112, 7168)], ids=str)
def test_a_choice_changes_only_where_tiles_begin(shape: tuple[int, int]) -> None:
    chosen = [dense(m, *shape) for m in range(1, 4097)]
    changes = {m for m in range(2, 4097) if chosen[m - 1] != chosen[m - 2]}
    assert changes <= set(tokens(4096))


def test_a_choice_comes_back() -> None:
    """So the kernel of the last M seen says nothing of the next one's."""
    chosen = [dense(m, 2112, 7168) for m in tokens(16384)]
    changes = sum(x != y for x, y in itertools.pairwise(chosen))
    assert changes > len(set(chosen))


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "groups", "tile"),
    [  # as DeepGEMM 0.1.5 compiled them
        ("contiguous", 1, 4096, 7168, 8, Tile(128, 32, 10, 1, 1)),
        ("contiguous", 641, 4096, 7168, 8, Tile(128, 192, 4, 1, 1)),
        ("contiguous", 1281, 4096, 7168, 8, Tile(128, 192, 4, 2, 1)),
        ("contiguous", 897, 7168, 2048, 32, Tile(128, 160, 5, 2, 1)),
        ("masked", 1, 4096, 7168, 8, Tile(64, 128, 8, 2, 1)),
        ("masked", 100, 4096, 7168, 8, Tile(128, 128, 5, 1, 2)),
        ("masked", 200, 4096, 7168, 8, Tile(128, 192, 4, 2, 1)),
        ("batched", 17, 512, 128, 16, Tile(32, 64, 16, 1, 1)),
        ("batched", 513, 512, 128, 16, Tile(128, 192, 4, 1, 1)),
        ("batched", 33, 128, 512, 128, Tile(64, 128, 8, 1, 1)),
    ],
)
def test_grouped_and_batched(kind: Kind, m: int, n: int, k: int, groups: int, tile: Tile) -> None:
    counted = groups if kind in ("masked", "batched") else 1
    assert choose(kind, m, n, k, counted, MULTIPROCESSORS) == tile


def test_an_odd_number_of_multiprocessors_has_no_clusters() -> None:
    found = {choose("dense", m, 2112, 7168, 1, 131) for m in tokens(8192)}
    assert {(x.cluster_m, x.cluster_n) for x in found} == {(1, 1)}
