"""FP8 GEMM with one scale for 128 features of a token and one for each 128x128 block of the weight.

    D[m, n] = sum_g scale_a[m, g] * scale_b[n // 128, g] * P[m, n, g] + bias[n]
    P[m, n, g] = sum over the 128 k of group g of A[m, k] * B[n, k]

The format of DeepSeek-V3 checkpoints (DeepSeek-V3 technical report, arXiv 2412.19437, section
3.3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import (
    batch_invariant,
    block_scaled_mm_aten,
    block_scaled_mm_deep_gemm,
    block_scaled_reference,
    checks,
    triton_support,
    ue8m0,
)
from compile_ext.ops.contract import Align, Gemm, Memory, OpContract, Pad
from compile_ext.ops.define import Kernel, define_op, never
from compile_ext.ops.errors import ShapeError
from compile_ext.ops.quantize import BLOCK, dequantize_fp8_groups, quantize_fp8_groups

NAME = "block_scaled_mm"
SMALL_M = 16  # tokens of one tile of block_scaled_mm_small_m.py


def block_scaled_mm_ref(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    product: block_scaled_reference.Product = torch.mm,
) -> Tensor:
    """The specification: dequantize, multiply and add in float32, round once at the end."""
    if a.dtype == torch.bfloat16:  # the kernel quantizes its own input; scale_a is not read
        a, scale_a = quantize_fp8_groups(a, use_ue8m0=scale_b.dtype == ue8m0.E8M0)
    assert scale_a is not None  # _check refuses an FP8 a without it
    x = dequantize_fp8_groups(a, scale_a)
    out = block_scaled_reference.times_blocks(x, b, scale_b, product)
    return (out if bias is None else out + bias.float()).to(out_dtype)


def _check(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    checks.dtype_in(NAME, "a", a, (checks.FP8, torch.bfloat16))
    checks.dtype_in(NAME, "b", b, (checks.FP8,))
    for name, x in (("a", a), ("b", b)):
        checks.rank_is(NAME, name, x, 2)
        checks.rows_contiguous(NAME, name, x)
    checks.same_k(NAME, a, b)
    block_scaled_reference.check_scale_b(NAME, b, scale_b)
    if a.dtype == checks.FP8:
        if scale_a is None:
            raise ShapeError(
                NAME,
                "a of float8_e4m3fn without scale_a",
                f"scale_a [m, ceil(k/{BLOCK})]",
                "pass what quantize_fp8_groups returned, or a bfloat16 a",
            )
        block_scaled_reference.check_scale_a(NAME, a, scale_a)
        checks.same_device(NAME, a=a, scale_a=scale_a)
    checks.same_device(NAME, a=a, b=b, scale_b=scale_b, bias=bias)
    checks.bias_fits(NAME, bias, b.shape[0])
    checks.out_dtype_is_float(NAME, out_dtype)


def _fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _why_not_small_m(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor, *_: object
) -> str | None:
    reason = triton_support.why_not(a)
    if reason is None and not checks.at_most(a.shape[0], SMALL_M):
        return f"takes up to {SMALL_M} tokens, M is {a.shape[0]}"
    read = scale_a if a.dtype == checks.FP8 else None
    return reason or ue8m0.why_not(scale_a=read, scale_b=scale_b)


OP = define_op(
    "block_scaled_mm(Tensor a, Tensor b, Tensor? scale_a, Tensor scale_b, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    check=_check,
    fake=_fake,
    kernels=(
        Kernel("deep_gemm", block_scaled_mm_deep_gemm.why_not, block_scaled_mm_deep_gemm.run),
        Kernel("aten", why_not=block_scaled_mm_aten.why_not, run=block_scaled_mm_aten.run),  # SM90
        Kernel(
            "triton_small_m", _why_not_small_m, triton_support.run_of("block_scaled_mm_small_m")
        ),
        Kernel("triton", triton_support.why_not, triton_support.run_of("block_scaled_mm_triton")),
        Kernel("reference", why_not=never, run=block_scaled_mm_ref),
        batch_invariant.kernel(
            batch_invariant.tiled("block_scaled_mm_triton"), block_scaled_mm_ref
        ),
    ),
    contract=OpContract(
        gemm=Gemm(a="a", b="b", scale_a="scale_a", scale_b="scale_b", bias="bias"),
        # 16 bytes: the smallest row that TMA and cuBLASLt address. Partial 128-blocks are the op's
        # own affair.
        align={
            "n": Align(16, pad={"b": 0, "scale_b": Pad(1.0, axis=0, block=BLOCK), "bias": 0}),
            "k": Align(
                16,
                pad={
                    "a": 0,
                    "b": 0,
                    "scale_a": Pad(1.0, axis=1, block=BLOCK),
                    "scale_b": Pad(1.0, axis=1, block=BLOCK),
                },
            ),
        },
        # cuBLASLt reads scales in rows of a multiple of 4 (``block_scaled_mm_aten.py``).
        memory={"scale_b": Memory(stride=block_scaled_mm_aten.SCALE_STRIDE)},
        unread={"scale_a": lambda a, **_: a.dtype == torch.bfloat16},
        prewait_reads=("b", "scale_b", "bias"),
    ),
)


def block_scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``dequantize(a) @ dequantize(b).T + bias``, accumulated in float32.

    Args:
        a: ``[m, k]`` float8_e4m3fn, or bfloat16: then the kernel quantizes it itself, as
            ``quantize_fp8_groups`` does (with use_ue8m0 where scale_b is float8_e8m0fnu), and does
            not read scale_a. Rows contiguous. m = 0 gives an empty result.
        b: ``[n, k]`` float8_e4m3fn, rows contiguous.
        scale_a: ``[m, ceil(k/128)]`` float32 or float8_e8m0fnu, any strides; None or anything where
            a is bfloat16.
        scale_b: ``[ceil(n/128), ceil(k/128)]`` float32 or float8_e8m0fnu.
        bias: ``[n]`` bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``[m, n]`` of out_dtype, contiguous.

    Raises:
        DtypeError, RankError, ShapeError, LayoutError, DeviceError, GradError.
    """
    out: Tensor = OP(a, b, scale_a, scale_b, bias, out_dtype)
    return out
