"""The rows of ``grouped_block_scaled_mm`` for a kernel that trusts their indices: before it, one
group for each block of rows; behind it, zeros where there is no group. Imports Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_M, _BLOCK_N = 32, 256


@triton.jit  # type: ignore[untyped-decorator]
def _group_kernel(  # type: ignore[no-untyped-def]
    m_indices, out,
    M, G, stride,
    ROWS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = tl.load(m_indices + m.to(tl.int64) * stride, mask=m < M, other=-1)
    group = tl.max(tl.where((index >= 0) & (index < G), index, -1), 0)
    tl.store(out + m, tl.zeros((ROWS,), tl.int32) + group)


@triton.jit  # type: ignore[untyped-decorator]
def _zero_kernel(  # type: ignore[no-untyped-def]
    out, m_indices,
    M, N, G, stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    index = tl.load(m_indices + m * stride, mask=m < M, other=0)
    idle = (m < M) & ((index < 0) | (index >= G))
    zeros = tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty)
    tl.store(out + m[:, None] * N + n[None, :], zeros, mask=idle[:, None] & (n < N)[None, :])


def group_of_each_block(m_indices: Tensor, groups: int, rows: int) -> Tensor:
    """The group of each block of ``rows`` rows, in every row of it: ``[m]`` int32, -1 for a block
    without one. There is memory behind it for a whole last block, which holds the same."""
    m = m_indices.shape[0]
    blocks = triton.cdiv(m, rows)
    out = m_indices.new_empty(blocks * rows, dtype=torch.int32)
    kernel: Any = _group_kernel
    kernel[(blocks,)](m_indices, out, m, groups, m_indices.stride(0), ROWS=rows)
    return out[:m]


def zero_idle_rows(out: Tensor, m_indices: Tensor, groups: int) -> None:
    """Write 0 into the rows of ``out [m, n]``, contiguous, whose index is no group."""
    m, n = out.shape
    grid = (triton.cdiv(m, _BLOCK_M) * triton.cdiv(n, _BLOCK_N),)
    kernel: Any = _zero_kernel
    kernel[grid](
        out, m_indices,
        m, n, groups, m_indices.stride(0),
        BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N,
    )  # fmt: skip
