"""A parameter with more rows, columns or blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Padding:
    """``F.pad(x, pad, value=value)`` of one parameter.

    Args:
        pad: widths in elements as F.pad takes them, last dimension first.
        value: what the new elements hold.
        keep_order: the result has x's memory order (a column-major weight stays column-major);
            without, the strides are those that F.pad gives.
    """

    pad: tuple[int, ...]
    value: float = field(compare=False)
    keep_order: bool = False
    exact_value: str = field(init=False, repr=False)  # 0.0 and -0.0 are equal, nan and nan are not

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact_value", repr(float(self.value)))

    def __call__(self, x: Tensor) -> Tensor:
        x = x.detach()
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        if not self.keep_order or order == list(range(x.dim())):
            return F.pad(x, self.pad, value=self.value)
        by_dim = self.widths(x.dim())
        permuted = [w for d in reversed(order) for w in by_dim[d]]
        padded = F.pad(x.permute(order), permuted, value=self.value)
        return padded.permute([order.index(d) for d in range(x.dim())])

    def widths(self, rank: int) -> list[tuple[int, int]]:
        """New elements before and behind, for each dimension."""
        last_first = [*zip(self.pad[::2], self.pad[1::2], strict=True)]
        return [*[(0, 0)] * (rank - len(last_first)), *reversed(last_first)]

    def keeps_as_prefix(self, x: Tensor) -> bool:
        """Whether x is the first part, in memory, of the result: x can live there."""
        if x.dim() == 0 or not x.is_contiguous():
            return False
        rows, *rest = self.widths(x.dim())
        return rows[0] == 0 and rows[1] > 0 and not any(map(any, rest))

    def __str__(self) -> str:
        return f"pad({list(self.pad)}, {self.value:g})"
