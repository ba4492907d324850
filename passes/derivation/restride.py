"""A parameter where its kernel wants it to lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True)
class Restride:
    """x where it lies as a kernel wants it, else a copy in the same memory order that does.

    The memory between the rows of a copy is zero, behind the last row as well: a kernel may read
    whole rows.

    Args:
        stride: strides other than 1 are multiples of this, in elements.
        address: so is the address, in bytes. At most 64, which every allocation has.
    """

    stride: int
    address: int = 1

    def __call__(self, x: Tensor) -> Tensor:
        x, strides = x.detach(), self._strides(x)
        if isinstance(x, FakeTensor):  # has no address; the graph is compiled for the strides alone
            return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
        if strides == x.stride() and x.data_ptr() % self.address == 0:
            return x
        size = max((n * s for n, s in zip(x.shape, strides, strict=True)), default=1)
        memory = torch.zeros(size, dtype=x.dtype, device=x.device)
        return memory.as_strided(x.shape, strides).copy_(x)

    def fits_strides(self, x: Tensor) -> bool:
        sizes = zip(x.stride(), x.shape, strict=True)
        return all(step == 1 or step % self.stride == 0 for step, n in sizes if n > 1)

    def _strides(self, x: Tensor) -> tuple[int, ...]:
        expanded = 0 in x.stride()  # which says nothing of the order
        if self.fits_strides(x) and not expanded:
            return x.stride()
        strides, step = [0] * x.dim(), 1
        for d in sorted(range(x.dim()), key=lambda d: (0 if expanded else x.stride(d), -d)):
            strides[d] = step
            step = -(-step * x.shape[d] // self.stride) * self.stride
        return tuple(strides)

    def __str__(self) -> str:
        what = [f"strides % {self.stride}"] * (self.stride > 1)
        what += [f"address % {self.address}"] * (self.address > 1)
        return f"fit({', '.join(what)})"
