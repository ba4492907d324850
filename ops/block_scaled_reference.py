"""What the GEMMs with 1x128 and 128x128 scales share: the product of one matrix with one weight,
and the checks of the operands.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compile_ext.ops import checks, ue8m0
from compile_ext.ops.errors import ShapeError
from compile_ext.ops.quantize import BLOCK, blocks_of, dequantize_fp8_blocks

Product = Callable[[Tensor, Tensor], Tensor]


def times_blocks(x: Tensor, b: Tensor, scale_b: Tensor, product: Product = torch.mm) -> Tensor:
    """``x @ dequantize(b).T`` in float32: x ``[m, k]`` float32, b ``[n, k]`` float8_e4m3fn.
    ``product`` multiplies ``[m, k]`` by ``[k, n]``."""
    # One row of blocks at a time: a float32 copy of the whole weight, made on each call, costs more
    # than the product.
    columns = [
        product(x, dequantize_fp8_blocks(rows, row_scale).t())
        for rows, row_scale in zip(b.split(BLOCK), scale_b.split(1), strict=True)
    ]
    return torch.cat(columns, dim=-1)


def check_operands(
    op: str,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    *,
    dims: tuple[str, str],
) -> None:
    """FP8 operands with their scales; ``dims`` names the dimensions of a and of b (``"gmk"``,
    ``"gnk"``). A letter that both have is one size."""
    for name, x, letters in (("a", a, dims[0]), ("b", b, dims[1])):
        checks.dtype_in(op, name, x, (checks.FP8,))
        checks.rank_is(op, name, x, len(letters), _form(letters))
        checks.rows_contiguous(op, name, x)
    for letter in (x for x in dims[0] if x in dims[1]):
        if not checks.same(a.shape[dims[0].index(letter)], b.shape[dims[1].index(letter)]):
            raise ShapeError(
                op,
                f"a {list(a.shape)} and b {list(b.shape)}",
                f"a {_form(dims[0])} and b {_form(dims[1])} with one {letter}",
                f"pass b as {_form(dims[1])}, untransposed",
            )
    check_scale_a(op, a, scale_a)
    check_scale_b(op, b, scale_b)
    checks.same_device(op, a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    checks.out_dtype_is_float(op, out_dtype)


def check_scale_a(op: str, a: Tensor, scale_a: Tensor) -> None:
    """One scale for 128 features of a row of ``a [..., k]``."""
    checks.dtype_in(op, "scale_a", scale_a, ue8m0.SCALES)
    checks.shape_is(op, "scale_a", scale_a, (*a.shape[:-1], blocks_of(a.shape[-1])))


def check_scale_b(op: str, b: Tensor, scale_b: Tensor) -> None:
    """One scale for each 128x128 block of ``b [..., n, k]``."""
    *lead, n, k = b.shape
    checks.dtype_in(op, "scale_b", scale_b, ue8m0.SCALES)
    checks.shape_is(op, "scale_b", scale_b, (*lead, blocks_of(n), blocks_of(k)))


def _form(letters: str) -> str:
    return f"[{', '.join(letters)}]"
