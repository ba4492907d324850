"""``block_scaled_mm`` for exactly one token, the shape of decode.

The kernels of block_scaled_mm, which have configurations of their own for one token. A separate op,
so that the choice shows in the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import block_scaled_mm_spec, checks
from compile_ext.ops.define import define_op
from compile_ext.ops.errors import ShapeError

NAME = "block_scaled_mm_m1"


def _check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    block_scaled_mm_spec.check(NAME, a, b, scale_a, scale_b, bias, out_dtype)
    if not checks.same(a.shape[0], 1):
        found, wanted = f"a of shape {list(a.shape)}", "one token: a of shape [1, k]"
        raise ShapeError(NAME, found, wanted, "call block_scaled_mm")


OP = define_op(
    f"{NAME}(Tensor a, Tensor b, Tensor? scale_a, Tensor scale_b, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    check=_check,
    fake=block_scaled_mm_spec.fake,
    kernels=block_scaled_mm_spec.KERNELS,
    contract=block_scaled_mm_spec.CONTRACT,
)


def block_scaled_mm_m1(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``block_scaled_mm`` where ``a`` is ``[1, k]``.

    Args, returns and errors are block_scaled_mm's; another M is a ShapeError.
    """
    out: Tensor = OP(a, b, scale_a, scale_b, bias, out_dtype)
    return out
