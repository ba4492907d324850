"""``block_scaled_mm`` for any shape, dtype and bias: one output tile a program.

D[m, n] = sum_g scale_a[m, g] * scale_b[n // 128, g] * (sum_{k in g} A[m, k] * B[n, k]) + bias[n]

The groups g of 128 are the steps of the loop: each product of tiles is scaled in float32 before it
is added. Imports Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile_ext.ops.fp8_triton import operand, quantize
from compile_ext.ops.quantize import BLOCK
from compile_ext.ops.triton_support import device_of, has_fp8, readable, tile

_ROWS_OF_TILES = 8  # tiles that run together share b and a in the L2


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    a, b, scale_a, scale_b, bias, out,
    M, N, K,
    stride_a, stride_b, stride_scale_a_m, stride_scale_a_k, stride_scale_b_n, stride_scale_b_k,
    QUANTIZES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FP8: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.swizzle2d(
        tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, tiles_m, tiles_n, GROUP
    )
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # 64 bits: an LM head has more than 2^31 elements.
    a_rows = a + m.to(tl.int64)[:, None] * stride_a
    b_rows = b + n.to(tl.int64)[None, :] * stride_b
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(tl.cdiv(K, BLOCK_K)):
        at = group * BLOCK_K + k
        if EVEN_K:
            x = tl.load(a_rows + at[None, :], mask=(m < M)[:, None], other=0.0)
            w = tl.load(b_rows + at[:, None], mask=(n < N)[None, :], other=0.0)
        else:
            x = tl.load(a_rows + at[None, :], mask=(m < M)[:, None] & (at < K)[None, :], other=0.0)
            w = tl.load(b_rows + at[:, None], mask=(n < N)[None, :] & (at < K)[:, None], other=0.0)
        if QUANTIZES:
            x, scale = quantize(x, 1, HAS_FP8)
        else:
            x = operand(x, HAS_FP8)
            scales = scale_a + m.to(tl.int64) * stride_scale_a_m + group * stride_scale_a_k
            scale = tl.load(scales, mask=m < M, other=0.0)[:, None]
        weight_scale = tl.load(
            scale_b + (tile_n * BLOCK_N // 128) * stride_scale_b_n + group * stride_scale_b_k
        )
        acc += tl.dot(x, operand(w, HAS_FP8)) * (scale * weight_scale)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    where = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


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
    shape = tile(m, a)
    grid = (triton.cdiv(m, shape["BLOCK_M"]) * triton.cdiv(n, shape["BLOCK_N"]),)
    quantizes = a.dtype == torch.bfloat16
    scale = scale_b if quantizes or scale_a is None else scale_a  # not read where it quantizes
    kernel: Any = _kernel
    with device_of(a):
        kernel[grid](
            readable(a), readable(b), scale, scale_b, bias, out,
            m, n, k,
            a.stride(0), b.stride(0), *scale.stride(), *scale_b.stride(),
            QUANTIZES=quantizes, HAS_BIAS=bias is not None, HAS_FP8=has_fp8(a),
            EVEN_K=k % BLOCK == 0,
            BLOCK_K=BLOCK, GROUP=_ROWS_OF_TILES,
            **shape, num_stages=3,
        )  # fmt: skip
    return out
