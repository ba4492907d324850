"""For which numbers of tokens a kernel is asked what it would launch, so that all M of a range are
covered."""

from __future__ import annotations

from collections.abc import Iterable

# Up to here every M is asked: no limit of a kernel of this package lies above it, but those that
# depend on M modulo TILE.
EACH = 272
# Hopper's largest tile has 256 rows; what depends on M beyond EACH does by M modulo 16 (Triton's
# classes of integers, rows of scales) and by the tiles of 64 rows (DeepGEMM's choice of tile).
TILE, RESIDUES = 64, 16


def representatives(low: int, high: int) -> Iterable[int]:
    """Of ``low..high``: each up to EACH, the RESIDUES from ``low`` on and below ``high``, and the
    first two and the last of each tile of TILE tokens."""
    found = set(range(low, min(high, EACH) + 1))
    found |= set(range(low, min(low + RESIDUES, high) + 1))
    found |= set(range(max(low, high - RESIDUES), high + 1))
    for start in range(-(-low // TILE) * TILE, high + 1, TILE):
        found |= {m for m in (start, start + 1, start + 2) if m <= high}
    return sorted(found)
