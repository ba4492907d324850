"""``grouped_block_scaled_mm``: one output tile a program, of one group. Imports Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile_ext.ops.block_scaled_tile_triton import tile_product
from compile_ext.ops.quantize import BLOCK
from compile_ext.ops.triton_support import device_of, has_fp8, readable, tile

_ROWS = 128  # of one group; a tile's rows divide it


@triton.jit  # type: ignore[untyped-decorator]
def _grouped_kernel(  # type: ignore[no-untyped-def]
    a, b, scale_a, scale_b, m_indices, out,
    M, N, K, G,
    stride_a, stride_b_g, stride_b_n, stride_scale_a_m, stride_scale_a_k,
    stride_scale_b_g, stride_scale_b_n, stride_scale_b_k,
    HAS_FP8: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    index = tl.load(m_indices + m, mask=m < M, other=-1)
    # An index that is no group is never used as an address.
    group = tl.max(tl.where(index < G, index, -1), 0)
    in_group = (m < M) & (index == group) & (group >= 0)
    at = tl.maximum(group, 0).to(tl.int64)
    acc = tile_product(
        a + m * stride_a, in_group, b + at * stride_b_g + n * stride_b_n, n < N,
        tl.where(group >= 0, K, 0),  # no step for a tile without a group
        scale_a + m * stride_scale_a_m, stride_scale_a_k,
        scale_b + at * stride_scale_b_g + (tile_n * BLOCK_N // 128) * stride_scale_b_n,
        stride_scale_b_k,
        False, HAS_FP8, EVEN_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    # Zeros by choice, not by product: 0 times a NaN of the weight is NaN.
    result = tl.where(in_group[:, None], acc, 0.0).to(out.dtype.element_ty)
    tl.store(out + m[:, None] * N + n[None, :], result, mask=(m < M)[:, None] & (n < N)[None, :])


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    m_indices: Tensor,
    out_dtype: torch.dtype,
    tile_m: int = _ROWS,
) -> Tensor:
    """``tile_m``: the M that the tile is for; its rows divide those of a group."""
    (m, k), (groups, n) = a.shape, b.shape[:2]
    out = a.new_empty(m, n, dtype=out_dtype)
    if not out.numel():
        return out
    shape = tile(tile_m, a)
    grid = (triton.cdiv(m, shape["BLOCK_M"]) * triton.cdiv(n, shape["BLOCK_N"]),)
    kernel: Any = _grouped_kernel
    with device_of(a):
        kernel[grid](
            readable(a), readable(b), readable(scale_a), readable(scale_b),
            m_indices.contiguous(), out,
            m, n, k, groups,
            a.stride(0), b.stride(0), b.stride(1), *scale_a.stride(), *scale_b.stride(),
            HAS_FP8=has_fp8(a), EVEN_K=k % BLOCK == 0,
            **shape, num_stages=3,
        )  # fmt: skip
    return out
