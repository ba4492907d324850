"""``block_scaled_mm`` for any shape, dtype and bias: one output tile a program. Imports Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile_ext.ops.block_scaled_tile_triton import tile_product
from compile_ext.ops.quantize import BLOCK
from compile_ext.ops.triton_support import device_of, has_fp8, readable, tile

_TILE_ROWS = 8  # whose tiles run together, and share b in the L2


@triton.jit  # type: ignore[untyped-decorator]
def _block_scaled_kernel(  # type: ignore[no-untyped-def]
    a, b, scale_a, scale_b, bias, out,
    M, N, K,
    stride_a, stride_b, stride_scale_a_m, stride_scale_a_k, stride_scale_b_n, stride_scale_b_k,
    stride_bias,
    QUANTIZES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FP8: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.swizzle2d(
        tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, tiles_m, tiles_n, TILE_ROWS
    )
    # 64 bits: an LM head has more than 2^31 elements.
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tile_product(
        a + m * stride_a, m < M, b + n * stride_b, n < N, K,
        scale_a + m * stride_scale_a_m, stride_scale_a_k,
        scale_b + (tile_n * BLOCK_N // 128) * stride_scale_b_n, stride_scale_b_k,
        QUANTIZES, HAS_FP8, EVEN_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias + n * stride_bias, mask=n < N, other=0.0).to(tl.float32)[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=mask)


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tile_m: int | None = None,
) -> Tensor:
    """``tile_m``: the M that the tile is for, where it is not that of a."""
    (m, k), n = a.shape, b.shape[0]
    out = a.new_empty(m, n, dtype=out_dtype)
    if not out.numel():
        return out
    shape = tile(tile_m or m, a)
    grid = (triton.cdiv(m, shape["BLOCK_M"]) * triton.cdiv(n, shape["BLOCK_N"]),)
    quantizes = a.dtype == torch.bfloat16
    scale = scale_b if quantizes or scale_a is None else scale_a  # not read where it quantizes
    kernel: Any = _block_scaled_kernel
    with device_of(a):
        kernel[grid](
            readable(a), readable(b), readable(scale), readable(scale_b), bias, out,
            m, n, k,
            a.stride(0), b.stride(0), *scale.stride(), *scale_b.stride(),
            0 if bias is None else bias.stride(0),
            QUANTIZES=quantizes, HAS_BIAS=bias is not None, HAS_FP8=has_fp8(a),
            EVEN_K=k % BLOCK == 0, TILE_ROWS=_TILE_ROWS,
            **shape, num_stages=3,
        )  # fmt: skip
    return out
