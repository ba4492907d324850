"""``router_gemm`` with one tile for every M: the kernel ``batch_invariant``. Imports Triton.

D[m, n] = sum_k A[m, k] * B[n, k] + bias[n]
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compile_ext.ops.contract import m_of
from compile_ext.ops.triton_support import device_of, has_bf16

# A router has few columns: small tiles, so that 256 of them occupy 8 multiprocessors at one token.
_BLOCK_M, _BLOCK_N, _BLOCK_K, _WARPS = 16, 32, 128, 4


@triton.jit  # type: ignore[untyped-decorator]
def _router_kernel(  # type: ignore[no-untyped-def]
    a, b, bias, out,
    M, N, K,
    stride_a_m, stride_a_k, stride_b_n, stride_b_k, stride_bias,
    HAS_BIAS: tl.constexpr, IN_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        # 64 bits, as above: any strides, so columns can lie far apart.
        k = (step * BLOCK_K + tl.arange(0, BLOCK_K)).to(tl.int64)
        mask_x, mask_w = (m < M)[:, None] & (k < K)[None, :], (n < N)[None, :] & (k < K)[:, None]
        x = tl.load(a + m[:, None] * stride_a_m + k[None, :] * stride_a_k, mask=mask_x, other=0.0)
        w = tl.load(b + n[None, :] * stride_b_n + k[:, None] * stride_b_k, mask=mask_w, other=0.0)
        if IN_FLOAT32:
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")  # Triton's default is TF32
    if HAS_BIAS:
        acc += tl.load(bias + n * stride_bias, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], acc, mask=(m < M)[:, None] & (n < N)[None, :])


def run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    n, k = b.shape
    out = a.new_empty(*a.shape[:-1], n, dtype=torch.float32)
    if not out.numel():
        return out
    rows = a.reshape(m_of(a), k)  # not -1: k may be 0
    in_float32 = not has_bf16(a) or not a.dtype == b.dtype == torch.bfloat16
    kernel: Any = _router_kernel
    grid = (triton.cdiv(rows.shape[0], _BLOCK_M) * triton.cdiv(n, _BLOCK_N),)
    with device_of(a):
        kernel[grid](
            rows, b, bias, out,
            rows.shape[0], n, k,
            *rows.stride(), *b.stride(), 0 if bias is None else bias.stride(0),
            HAS_BIAS=bias is not None,
            IN_FLOAT32=in_float32,
            BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K,
            num_warps=_WARPS, num_stages=3,
        )  # fmt: skip
    return out
