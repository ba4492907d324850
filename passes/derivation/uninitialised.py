"""Memory for an argument that nobody reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def poison_byte(dtype: torch.dtype) -> int:
    """The byte that, repeated, is NaN: 0xFF, which is -1 for integers; 0x80 for the FP8 formats
    without a negative zero, whose only NaN that is.
    """
    return 0x80 if dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz) else 0xFF


@dataclass(frozen=True)
class Uninitialised:
    """A tensor that holds nothing: what an op gets for an argument that it does not read.

    Args:
        shape, stride: in elements.
        poison: every byte is that of ``poison_byte`` instead: who reads it shows it
            (``compile_ext.poison``).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    poison: bool = False

    def __call__(self) -> Tensor:
        if not self.poison:
            return torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        size = 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize
        memory = torch.full((size,), poison_byte(self.dtype), dtype=torch.uint8, device=self.device)
        return memory.view(self.dtype).as_strided(self.shape, self.stride)

    def __str__(self) -> str:
        return "poison" if self.poison else "uninitialised"
