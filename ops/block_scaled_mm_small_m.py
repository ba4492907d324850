"""``block_scaled_mm`` for up to 16 tokens, the shape of decode: bound by the bytes of the weight.

D[m, n] = sum_g scale_a[m, g] * scale_b[n // 128, g] * (sum_{k in g} A[m, k] * B[n, k]) + bias[n]

A program computes 16 columns of the result over all of K, so that N = 576 still occupies 36
multiprocessors, and its warps divide K among them: the product is a batch of SLICES products, one
a group of 128, summed at the end in a fixed order. The first AHEAD steps of the weight are loaded
before anything else, all at once: what counts is how many bytes are under way. On Hopper, products
of e4m3 tiles with fewer than 64 rows are converted to float16, exactly, and summed in float32.

Imports Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile_ext.ops.fp8_triton import operand, quantize
from compile_ext.ops.quantize import blocks_of
from compile_ext.ops.triton_support import device_of, has_fp8, readable

_BLOCK_N = 16  # rows of one tensor core instruction; divides 128, the rows of one weight scale
_SLICES, _WARPS = 8, 8
# Steps of 16 KiB that the registers hold without a spill where K is a multiple of 128 and rows are
# aligned: as e4m3; as e4m3 beside an activation that is quantized here; decoded as they come.
_AHEAD, _AHEAD_QUANTIZES, _AHEAD_DECODED = 7, 4, 2


@triton.jit  # type: ignore[untyped-decorator]
def _weight(  # type: ignore[no-untyped-def]
    rows, in_n, scales, stride_scale_k, step, K,
    SLICES: tl.constexpr,
):  # fmt: skip
    """The weight [SLICES, BLOCK_N, 128] of one step, and its scales [SLICES, 1, 1]."""
    group = step * SLICES + tl.arange(0, SLICES)
    at = group[:, None, None] * 128 + tl.arange(0, 128)[None, None, :]
    w = tl.load(rows[None, :, None] + at, mask=in_n[None, :, None] & (at < K), other=0.0)
    scale = tl.load(scales + group * stride_scale_k, mask=group * 128 < K, other=0.0)
    return w, scale[:, None, None]


@triton.jit  # type: ignore[untyped-decorator]
def _products(  # type: ignore[no-untyped-def]
    w, weight_scale, rows, in_m, scales, stride_scale_k, step, K,
    QUANTIZES: tl.constexpr, HAS_FP8: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """The products [SLICES, BLOCK_N, BLOCK_M] of one step, scaled."""
    group = (step * SLICES + tl.arange(0, SLICES))[:, None, None]
    at = group * 128 + tl.arange(0, 128)[None, :, None]
    in_m = in_m[None, None, :]
    x = tl.load(rows[None, None, :] + at, mask=in_m & (at < K), other=0.0)
    if QUANTIZES:
        x, scale = quantize(x, 1, HAS_FP8)
    else:
        x = operand(x, HAS_FP8)
        where = scales[None, None, :] + group.to(tl.int64) * stride_scale_k
        scale = tl.load(where, mask=in_m & (group * 128 < K), other=0.0)
    return tl.dot(operand(w, HAS_FP8), x) * (scale * weight_scale)


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    a, b, scale_a, scale_b, bias, out,
    M, N, K, STEPS,
    stride_a, stride_b, stride_scale_a_m, stride_scale_a_k, stride_scale_b_n, stride_scale_b_k,
    stride_bias,
    QUANTIZES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FP8: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK_N
    # 64 bits: an LM head has more than 2^31 elements, and rows of a can lie far apart.
    n, m = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M).to(tl.int64)
    in_n, in_m = n < N, m < M
    w_rows, w_scales = b + n * stride_b, scale_b + first // 128 * stride_scale_b_n
    x_rows, x_scales = a + m * stride_a, scale_a + m * stride_scale_a_m
    ahead = ()
    for step in tl.static_range(AHEAD):
        ahead += (_weight(w_rows, in_n, w_scales, stride_scale_b_k, step, K, SLICES),)  # type: ignore[assignment]
    acc = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.static_range(AHEAD):
        w, scale = ahead[step]  # type: ignore[var-annotated]
        acc += _products(
            w, scale, x_rows, in_m, x_scales, stride_scale_a_k, step, K, QUANTIZES, HAS_FP8, SLICES
        )
    for step in range(AHEAD, STEPS):
        w, scale = _weight(w_rows, in_n, w_scales, stride_scale_b_k, step, K, SLICES)
        acc += _products(
            w, scale, x_rows, in_m, x_scales, stride_scale_a_k, step, K, QUANTIZES, HAS_FP8, SLICES
        )
    result = tl.sum(acc, 0)
    if HAS_BIAS:
        result += tl.load(bias + n * stride_bias, mask=in_n, other=0.0).to(tl.float32)[:, None]
    where = out + m[None, :] * N + n[:, None]
    tl.store(where, result.to(out.dtype.element_ty), mask=in_n[:, None] & in_m[None, :])


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    out = a.new_empty(m, n, dtype=out_dtype)
    if not out.numel():
        return out
    steps = triton.cdiv(blocks_of(k), _SLICES)
    quantizes = a.dtype == torch.bfloat16
    scale = scale_b if quantizes or scale_a is None else scale_a  # not read where it quantizes
    ahead = (_AHEAD_QUANTIZES if quantizes else _AHEAD) if has_fp8(a) else _AHEAD_DECODED
    kernel: Any = _kernel
    with device_of(a):
        kernel[(triton.cdiv(n, _BLOCK_N),)](
            readable(a), readable(b), scale, scale_b, bias, out,
            m, n, k, steps,
            a.stride(0), b.stride(0), *scale.stride(), *scale_b.stride(),
            0 if bias is None else bias.stride(0),
            QUANTIZES=quantizes, HAS_BIAS=bias is not None, HAS_FP8=has_fp8(a),
            BLOCK_M=8 if m <= 8 else 16, BLOCK_N=_BLOCK_N, SLICES=_SLICES,
            AHEAD=min(steps, ahead),
            num_warps=_WARPS,
        )  # fmt: skip
    return out
