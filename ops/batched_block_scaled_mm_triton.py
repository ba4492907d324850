"""``grouped_block_scaled_mm_masked`` and ``fp8_bmm``: a batch of products, a tile a program.

The two differ in the order of the axes, which is a matter of strides, and in whether the rows that
are in use are counted. Imports Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile_ext.ops.block_scaled_tile_triton import tile_product
from compile_ext.ops.quantize import BLOCK
from compile_ext.ops.triton_support import device_of, has_fp8, readable, tile


@triton.jit  # type: ignore[untyped-decorator]
def _batched_kernel(  # type: ignore[no-untyped-def]
    a, b, scale_a, scale_b, used, out,
    M, N, K,
    stride_a_g, stride_a_m, stride_b_g, stride_b_n,
    stride_scale_a_g, stride_scale_a_m, stride_scale_a_k,
    stride_scale_b_g, stride_scale_b_n, stride_scale_b_k, stride_out_g, stride_out_m,
    COUNTS: tl.constexpr, HAS_FP8: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    g = tl.program_id(1).to(tl.int64)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(tl.load(used + g), M) if COUNTS else M
    acc = tile_product(
        a + g * stride_a_g + m * stride_a_m, m < rows, b + g * stride_b_g + n * stride_b_n, n < N,
        tl.where(tile_m * BLOCK_M < rows, K, 0),  # no step for a tile without rows
        scale_a + g * stride_scale_a_g + m * stride_scale_a_m, stride_scale_a_k,
        scale_b + g * stride_scale_b_g + (tile_n * BLOCK_N // 128) * stride_scale_b_n,
        stride_scale_b_k,
        False, HAS_FP8, EVEN_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    where = out + g * stride_out_g + m[:, None] * stride_out_m + n[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


def run_masked(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    masked_m: Tensor,
    expected_m: int,
    out_dtype: torch.dtype,
    tile_m: int | None = None,
) -> Tensor:
    """``tile_m``: the M that the tile is for, where it is not the one that is expected."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)
    tile_m = tile_m or min(expected_m, a.shape[1])
    _launch(a, b, scale_a, scale_b, masked_m.contiguous(), tile_m, out)
    return out


def run_bmm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: torch.dtype,
    tile_m: int | None = None,
) -> Tensor:
    """``tile_m``: the M that the tile is for, where it is not that of a."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)
    heads_first = a.transpose(0, 1), b, scale_a.transpose(0, 1), scale_b
    _launch(*heads_first, None, tile_m or a.shape[0], out.transpose(0, 1))
    return out


def _launch(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    used: Tensor | None,
    tile_m: int,
    out: Tensor,
) -> None:
    """``out [g, m, n]``, rows contiguous, of ``a [g, m, k]`` and ``b [g, n, k]``."""
    (groups, m, k), n = a.shape, b.shape[1]
    if not out.numel():
        return
    shape = tile(tile_m, a)
    grid = (triton.cdiv(m, shape["BLOCK_M"]) * triton.cdiv(n, shape["BLOCK_N"]), groups)
    kernel: Any = _batched_kernel
    with device_of(a):
        kernel[grid](
            readable(a), readable(b), readable(scale_a), readable(scale_b), used, out,
            m, n, k,
            *a.stride()[:2], *b.stride()[:2], *scale_a.stride(), *scale_b.stride(),
            *out.stride()[:2],
            COUNTS=used is not None, HAS_FP8=has_fp8(a), EVEN_K=k % BLOCK == 0,
            **shape, num_stages=3,
        )  # fmt: skip
