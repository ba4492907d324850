"""For which numbers of tokens a kernel is asked what it would launch, so that all M of a range are
covered."""

from __future__ import annotations

from collections.abc import Iterable

# Up to here every M is asked: no limit of a kernel of this package lies above it.
EACH = 272
# What depends on M beyond that does so by M modulo 16 (Triton's classes of integers, rows of
# scales) and by tiles of 64 rows (DeepGEMM's choice of tile).
TILE, RESIDUES = 64, 16
# Beyond it a choice of a kernel depends on M only by whole blocks of this many rows (DeepGEMM's
# masked GEMM takes no others), if at all.
ROWS = 128


def representatives(low: int, high: int) -> Iterable[int]:
    """Of ``low..high``, the M for which a kernel's launches are looked at: each up to EACH, the
    RESIDUES from ``low`` on and up to ``high``, and the first of each tile of TILE tokens."""
    found = {*range(low, min(high, EACH) + 1), *range(low, min(low + RESIDUES, high + 1))}
    found |= {*range(max(low, high - RESIDUES + 1), high + 1)}
    found |= {m for m in range(1, high + 1, TILE) if m >= low}
    return sorted(found)


def limits(low: int, high: int) -> set[int]:
    """Of ``low..high``, the M for which an op is asked which kernel it takes: the first, the last,
    each up to EACH, and multiples of ROWS and the next number beyond each. Rows of a measured table
    have limits of their own."""
    found = {*range(low, min(high, EACH) + 1), low, high}
    found |= {m for x in range(ROWS, high + 1, ROWS) for m in (x, x + 1)}
    return {m for m in found if low <= m <= high}
