"""FP8 GEMM with one scale for the tensor, or one a token and one an output channel.

D[m, n] = (sum_k A[m, k] * B[n, k]) * scale_a[m] * scale_b[n] + bias[n]
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import (
    batch_invariant,
    block_scaled_reference,
    checks,
    scaled_mm_aten,
    triton_support,
)
from compile_ext.ops.contract import Align, Gemm, OpContract
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.quantize import fp8_to_float32

NAME = "scaled_mm"
_ROWS_AT_ONCE = 1024


def scaled_mm_ref(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    product: block_scaled_reference.Product = torch.mm,
) -> Tensor:
    """The specification: everything in float32, rounded once at the end."""
    x = fp8_to_float32(a)
    # Some rows at a time: the float32 copy of an LM head, 50257 x 256, is 51 MB; a small one stays
    # in the cache.
    parts = [product(x, fp8_to_float32(rows).t()) for rows in b.split(_ROWS_AT_ONCE)]
    scaled = torch.cat(parts, dim=-1) * scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    return (scaled if bias is None else scaled + bias.float()).to(out_dtype)


def _check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    for name, x in (("a", a), ("b", b)):
        checks.dtype_in(NAME, name, x, (checks.FP8,))
        checks.rank_is(NAME, name, x, 2)
        checks.rows_contiguous(NAME, name, x)
    checks.same_device(NAME, a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    checks.same_k(NAME, a, b)
    for name, scale, size in (("scale_a", scale_a, a.shape[0]), ("scale_b", scale_b, b.shape[0])):
        checks.dtype_in(NAME, name, scale, (torch.float32,))
        checks.shape_is(NAME, name, scale, (size, 1), (size,), (1, 1), (1,), ())
    checks.bias_fits(NAME, bias, b.shape[0])
    checks.out_dtype_is_float(NAME, out_dtype)


def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


OP = define_op(
    "scaled_mm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    check=_check,
    fake=_fake,
    kernels=(
        # cuBLASLt
        Kernel("aten", why_not=scaled_mm_aten.why_not, run=scaled_mm_aten.run, compiles=False),
        Kernel("triton", triton_support.why_not, triton_support.run_of("scaled_mm_triton")),
        Kernel("reference", why_not=never, run=scaled_mm_ref, compiles=False),
        batch_invariant.kernel(batch_invariant.tiled("scaled_mm_triton"), scaled_mm_ref),
    ),
    contract=OpContract(
        gemm=Gemm(a="a", b="b", scale_a="scale_a", scale_b="scale_b", bias="bias"),
        # cuBLASLt and CUTLASS FP8 need N and K in multiples of 16 elements.
        align={
            "n": Align(16, pad={"b": 0, "scale_b": 1.0, "bias": 0}),
            "k": Align(16, pad={"a": 0, "b": 0}),
        },
        prewait_reads=("b", "scale_b", "bias"),
    ),
)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``(a @ b.T) * scale_a * scale_b + bias``, accumulated in float32.

    Args:
        a: ``[m, k]`` float8_e4m3fn, rows contiguous. m = 0 gives an empty result.
        b: ``[n, k]`` float8_e4m3fn, rows contiguous.
        scale_a: float32, one element, or one a token: ``[m]`` or ``[m, 1]``.
        scale_b: float32, one element, or one an output channel: ``[n]`` or ``[n, 1]``.
        bias: ``[n]`` bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[m, n]`` of out_dtype, contiguous.

    Raises:
        DtypeError, RankError, ShapeError, LayoutError, DeviceError, GradError.
    """
    out: Tensor = OP(a, b, scale_a, scale_b, bias, out_dtype)
    return out
