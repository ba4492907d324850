"""Derivations: pure functions of one parameter whose result is a derived constant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True)
class Padding:
    """``F.pad(x, pad, value=value)``.

    Args:
        pad: widths in elements as F.pad takes them, last dimension first.
        value: what the new elements hold.
        keep_order: the result has x's memory order (a column-major weight stays column-major);
            without, the strides are those that F.pad gives.
    """

    pad: tuple[int, ...]
    value: float
    keep_order: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        x = x.detach()
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        if not self.keep_order or order == list(range(x.dim())):
            return F.pad(x, self.pad, value=self.value)
        widths = [
            (self.pad[2 * i], self.pad[2 * i + 1]) if 2 * i < len(self.pad) else (0, 0)
            for i in range(x.dim())
        ]  # of the last dimension first
        by_dim = widths[::-1]
        permuted = [w for d in reversed(order) for w in by_dim[d]]
        padded = F.pad(x.permute(order), permuted, value=self.value)
        return padded.permute([order.index(d) for d in range(x.dim())])

    def __str__(self) -> str:
        return f"pad({list(self.pad)}, {self.value:g})"


@dataclass(frozen=True)
class Chain:
    """One derivation after another: a weight padded by hand, then to its kernel's alignment."""

    steps: tuple[Padding, ...]

    def __call__(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x

    def __str__(self) -> str:
        return " then ".join(map(str, self.steps))


# Every kind is a frozen, hashable callable: equal derivations of one parameter share one constant.
Derivation = Padding | Chain


def after(first: Derivation, second: Padding) -> Chain:
    steps = first.steps if isinstance(first, Chain) else (first,)
    return Chain((*steps, second))


def why_not(source: Any) -> str | None:
    """Why no constant may be derived from this tensor, or None."""
    if not isinstance(source, Tensor):
        return f"it is a {type(source).__name__}, not a tensor"
    if type(source) not in (Tensor, torch.nn.Parameter) and not isinstance(source, FakeTensor):
        return f"it is a tensor subclass ({type(source).__name__})"
    if source.layout != torch.strided:
        return f"its layout is {source.layout}"
    if source.is_inference():
        return "it is an inference tensor: without a version counter an update could not be seen"
    if source.numel() == 0:
        return "it has no elements"
    return None
