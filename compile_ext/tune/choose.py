"""From times to rows: which kernel is the fastest beyond noise, and for which range of M."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from compile_ext.ops.kernel_table import Row

# A kernel that stands later in its op's tuple has to be faster by more than this, so that the table
# is the same the next time.
NOISE = 0.01


@dataclass(frozen=True)
class Timing:
    """Microseconds of one layer: the median, and the quartiles around it."""

    us: float
    low: float
    high: float


def fastest(timings: Mapping[str, Timing]) -> str | None:
    """The kernel for a table; ``timings`` in the order of the op's tuple. None of no kernel."""
    best: str | None = None
    for name, timing in timings.items():
        if best is None or _beyond_noise(timing, timings[best]):
            best = name
    return best


def _beyond_noise(later: Timing, earlier: Timing) -> bool:
    return later.us < earlier.us * (1 - NOISE) and later.high < earlier.low


def rows_of(op: str, n: int, k: int, by_m: Mapping[int, str | None]) -> Iterator[Row]:
    """Rows of one shape from the fastest kernel at each measured M.

    Neighbours with one kernel are one row. A row ends before the next measured M, and the last one
    at the largest; where no kernel runs there is no row.
    """
    measured = sorted(by_m)
    first = 0
    for i, m in enumerate(measured):
        kernel = by_m[m]
        following = measured[i + 1] if i + 1 < len(measured) else None
        if i == 0 or kernel != by_m[measured[i - 1]]:
            first = m
        if kernel is not None and (following is None or by_m[following] != kernel):
            yield Row(op, n, k, (first, m if following is None else following - 1), kernel)
