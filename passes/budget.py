"""How much memory derived constants may take.

Padding replaces a copy that each call would make anyway, so that it is always worth its memory;
other results (a cast to float32, a dequantized weight) are larger than their sources, and a user
who chose FP8 for its size did not ask for a bfloat16 copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compile_ext.passes.derivation import Chain, Derivation, Program

# Of the bytes of the graph's parameters and buffers. A router weight in float32 is far below
# (0.1 % of a layer of DeepSeek-V3); a second copy of a layer's largest weight is above.
DEFAULT_SHARE = 1 / 8
# A constant that comes from no parameter, up to this size: a unit scale has 4 bytes, and a model
# without weights in its graph would have no budget for it.
SMALL_BYTES = 4096


@dataclass(eq=False)
class Budget:
    """The bytes of one compilation.

    Args:
        limit: bytes for all constants; None: DEFAULT_SHARE of ``weights`` for what is no padding.
        weights: bytes of the graph's parameters and buffers.
    """

    limit: int | None
    weights: int
    used: int = 0
    _paid: set[object] = field(default_factory=set)

    def charge(self, wanted: Mapping[object, int]) -> str | None:
        """Take the memory for these constants, in bytes by identity; or say why not."""
        new = {key: cost for key, cost in wanted.items() if key not in self._paid}
        cost = sum(new.values())
        limit = int(DEFAULT_SHARE * self.weights) if self.limit is None else self.limit
        if cost and self.used + cost > limit:
            return (
                f"it would take {cost} bytes, and {limit - self.used} of {limit} are left"
                " (compile_ext.memory_budget)"
            )
        self.used += cost
        self._paid.update(new)
        return None

    def is_free(self, how: Derivation) -> bool:
        """Whether a constant of parameters is not charged for."""
        return self.limit is None and _is_layout(how)

    def is_small(self, nbytes: int) -> bool:
        """Whether a constant of none is not charged for."""
        return self.limit is None and nbytes <= SMALL_BYTES


def _is_layout(how: Derivation) -> bool:
    """Whether it only pads a parameter, or a view of one, or gives it other strides."""
    if isinstance(how, Chain) and isinstance(how.first, Program):
        return how.first.is_view
    return not isinstance(how, Program)
