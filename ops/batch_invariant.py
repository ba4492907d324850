"""The kernel ``batch_invariant`` of an op: a row of the result has the same bits whatever M is.

Row i of ``op(x[:m])`` depends on how a sum over K is cut into parts, and fast kernels cut it, or
choose their tile, by M. This one has one tile and one order of K for every M: a Triton kernel on
CUDA. On the CPU it is the reference, one row of a product at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compile_ext.ops import triton_support
from compile_ext.ops.define import Kernel, Result

NAME = "batch_invariant"
# Of one tile: half empty at 32 tokens and less, which costs little where the weight's bytes are
# what takes time; from 64 on, Hopper's tensor cores take e4m3 tiles as they are.
TILE_M = 64


def kernel(triton: Callable[..., Result], reference: Callable[..., Result]) -> Kernel:
    """The kernel of an op, which stands behind its reference: only a call that names it gets there.

    Args:
        triton: runs the call with one tile, whatever M is.
        reference: runs it on the CPU; its argument ``product`` takes the place of ``torch.mm``.
    """

    def run(a: Tensor, *rest: Any) -> Result:
        if runs_reference(a):
            return reference(a, *rest, product=product_by_row)
        return triton(a, *rest)

    return Kernel(NAME, why_not, run)


def tiled(module: str, function: str = "run") -> Callable[..., Result]:
    """A launcher of ``compile_ext.ops.<module>`` whose last argument is the M that it takes its
    tile for."""
    launch = triton_support.run_of(module, function)
    return lambda *args: launch(*args, TILE_M)


def why_not(a: Tensor, *_: object) -> str | None:
    return None if runs_reference(a) else triton_support.why_not(a)


def runs_reference(a: Tensor) -> bool:
    return a.device.type == "cpu"


def product_by_row(x: Tensor, w: Tensor) -> Tensor:
    """``x [m, k] @ w [k, n]``, each row by a product of its own: BLAS sums in another order for
    another number of rows (MKL, [m, 7168] x [7168, 256]: 9 of m = 1..64 differ from m = 64), or
    for another alignment, which ``clone`` makes that of a new tensor.
    """
    return torch.cat([row.clone() @ w for row in x.split(1)])
