"""The compile-time parameters of the router's kernels in CuTe DSL, and which ones a call has."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import NamedTuple

MEASURED = Path(__file__).with_name("router_cute.json")
VECTOR = 8  # bfloat16 values in 16 bytes, the most that a thread loads at once
_CTAS = 128  # of a call: nearly one for each multiprocessor of an H200, which has 132
_REGISTERS, _OTHERS = 112, 36  # of a thread: for its share of the weight, and for all else


class Split(NamedTuple):
    """How a call of one token is cut.

    Args:
        columns: output features of a cluster, a multiple of ``cluster``.
        cluster: CTAs that divide K among them: 1, 2, 4 or 8.
        vectors: of 8 values of a row of the weight, for a thread.
        widens: whether the weight is converted to float32 before the wait. It takes twice the
            registers, and fewer instructions behind the wait.
        blocks: CTAs that must fit on a multiprocessor, which bounds a thread's registers. More than
            one, so that the next kernels' weights arrive while this one computes.
    """

    columns: int
    cluster: int
    vectors: int
    widens: bool
    blocks: int


class DotParameters(NamedTuple):
    """Of ``router_dot_cute_kernel``.

    Args:
        k: input features, a multiple of VECTOR.
        split: how they are cut.
        bias: its dtype, or None.
        has_norm: whether a norm comes first; then these:
        has_weight: whether it has a weight.
        adds: whether a residual is added before it.
        rounds: whether it rounds before its weight.
    """

    k: int
    split: Split
    bias: str | None = None
    has_norm: bool = False
    has_weight: bool = False
    adds: bool = False
    rounds: bool = False

    @property
    def columns(self) -> int:
        return self.split.columns

    @property
    def cluster(self) -> int:
        return self.split.cluster

    @property
    def vectors(self) -> int:
        return self.split.vectors

    @property
    def widens(self) -> bool:
        return self.split.widens

    @property
    def share(self) -> int:
        """Vectors of a row for one CTA."""
        return -(-(self.k // VECTOR) // self.cluster)

    @property
    def threads(self) -> int:
        return _up(-(-self.share // self.vectors), 32)

    @property
    def is_even(self) -> bool:
        """Whether the threads' vectors are exactly those of a row."""
        return self.threads * self.vectors * self.cluster * VECTOR == self.k

    @property
    def sources(self) -> int:
        """Of a sum: the warps of a cluster."""
        return self.cluster * self.threads // 32

    @property
    def blocks(self) -> int:
        return self.split.blocks

    def grid(self, n: int) -> int:
        return -(-n // self.columns) * self.cluster


class MmaParameters(NamedTuple):
    """Of ``router_mma_cute_kernel``.

    Args:
        k: input features, a multiple of VECTOR.
        cluster: CTAs that divide K among them: 2, 4 or 8. Not 1: ``st.async`` is an illegal
            instruction outside of a cluster.
        warps: of a CTA, that divide its share.
        tokens: of a CTA: 8, 16 or 32.
        bias: its dtype, or None.
    """

    k: int
    cluster: int
    warps: int
    tokens: int
    bias: str | None = None

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def share(self) -> int:
        """Pieces of 32 features for one CTA."""
        return -(-self.k // (32 * self.cluster))

    @property
    def pieces(self) -> int:
        """For a warp."""
        return -(-self.share // self.warps)

    @property
    def is_even(self) -> bool:
        return self.pieces * self.warps * self.cluster * 32 == self.k

    def grid(self, m: int, n: int) -> int:
        return -(-n // 16) * self.cluster * -(-m // self.tokens)


def split(n: int, k: int, has_norm: bool) -> Split | None:
    """How a call of one token is cut: as measured for its shape, else as its like. None where K
    does not fit into the registers of a cluster."""
    measured = _measured("norm" if has_norm else "dot").get((n, k))
    if measured:
        columns, cluster, vectors, widens, blocks = measured[0][1]
        return Split(columns, cluster, vectors, bool(widens), blocks)
    # Few columns go without clusters, whose CTAs wait for each other.
    wanted = [(1, -(-n // _CTAS), 640)] if n <= 4 * _CTAS else []
    wanted.append((4, 4 * -(-n // _CTAS), 512))
    for cluster, columns, most_threads in wanted:
        share = -(-(k // VECTOR) // cluster)
        vectors = -(-share // most_threads)
        held = vectors * VECTOR // 2  # registers of a column
        columns = min(columns, _REGISTERS // held // cluster * cluster)
        if columns:
            widens = 2 * columns * held <= 64
            threads = _up(-(-share // vectors), 32)
            registers = _up(columns * held * (1 + widens) + _OTHERS, 8)
            blocks = max(1, min(8, 65536 // (threads * registers)))
            return Split(columns, cluster, vectors, widens, blocks)
    return None


def mma(m: int, n: int, k: int, bias: str | None) -> MmaParameters | None:
    """The parameters of a call of more than one token. None as above."""
    for last, config in _measured("mma").get((n, k), ()):
        if m <= last:
            cluster, warps, tokens = config
            return MmaParameters(k, cluster, warps, tokens, bias)
    groups = -(-n // 16)
    cluster = next((x for x in (2, 4) if groups * x >= 40), 8)
    for warps in (4, 8, 16):
        made = MmaParameters(k, cluster, warps, 8 if m <= 16 else 16, bias)
        if made.pieces <= 7 or (warps == 16 and made.pieces <= 14):
            return made
    return None


@functools.cache
def _measured(kernel: str) -> dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]]:
    """For N and K, the last M of each range and its configuration: ``sweep_router.py --ship``."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    found: dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]] = {}
    for row in rows:
        if row["kernel"] == kernel:
            at = row["n"], row["k"]
            found.setdefault(at, []).append((row["last_m"], tuple(row["config"])))
    return found


def _up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
