"""``scaled_mm`` for any shape, scales, dtype and bias: one output tile a program.

D[m, n] = (sum_k A[m, k] * B[n, k]) * scale_a[m] * scale_b[n] + bias[n]

Imports Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile_ext.ops.fp8_triton import operand
from compile_ext.ops.triton_support import device_of, has_fp8, readable, tile

_BLOCK_K = 128
_TILE_ROWS = 8  # whose tiles run together, and share b in the L2


@triton.jit  # type: ignore[untyped-decorator]
def _scaled_kernel(  # type: ignore[no-untyped-def]
    a, b, scale_a, scale_b, bias, out,
    M, N, K,
    stride_a, stride_b, stride_scale_a, stride_scale_b, stride_bias,
    HAS_BIAS: tl.constexpr, HAS_FP8: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.swizzle2d(
        tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, tiles_m, tiles_n, TILE_ROWS
    )
    # 64 bits: an LM head has more than 2^31 elements.
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_rows = a + m[:, None] * stride_a
    b_rows = b + n[None, :] * stride_b
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        at = step * BLOCK_K + k
        if EVEN_K:
            x = tl.load(a_rows + at[None, :], mask=(m < M)[:, None], other=0.0)
            w = tl.load(b_rows + at[:, None], mask=(n < N)[None, :], other=0.0)
        else:
            x = tl.load(a_rows + at[None, :], mask=(m < M)[:, None] & (at < K)[None, :], other=0.0)
            w = tl.load(b_rows + at[:, None], mask=(n < N)[None, :] & (at < K)[:, None], other=0.0)
        # Added here and not inside: Hopper's tensor cores keep 14 bits of a sum over all of K.
        acc += tl.dot(operand(x, HAS_FP8), operand(w, HAS_FP8))
    # A scale of the whole tensor has stride 0.
    rows = tl.load(scale_a + m * stride_scale_a, mask=m < M, other=0.0)
    columns = tl.load(scale_b + n * stride_scale_b, mask=n < N, other=0.0)
    acc = acc * rows[:, None] * columns[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + n * stride_bias, mask=n < N, other=0.0).to(tl.float32)[None, :]
    where = out + m[:, None] * N + n[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
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
    kernel: Any = _scaled_kernel
    with device_of(a):
        kernel[grid](
            readable(a), readable(b), scale_a, scale_b, bias, out,
            m, n, k,
            a.stride(0), b.stride(0), _stride(scale_a), _stride(scale_b),
            0 if bias is None else bias.stride(0),
            HAS_BIAS=bias is not None, HAS_FP8=has_fp8(a), EVEN_K=k % _BLOCK_K == 0,
            BLOCK_K=_BLOCK_K, TILE_ROWS=_TILE_ROWS,
            **shape, num_stages=3,
        )  # fmt: skip
    return out


def _stride(scale: Tensor) -> int:
    """Of one row's scale to the next; 0 for a scale of the whole tensor."""
    return 0 if scale.numel() == 1 else scale.stride(0)
