"""``attn_residual``: one token a program, its rows read once, the mixture kept in registers.

    score[i] = sum_k query[k] * v[i, k] / sqrt(mean_k(v[i, k]^2) + key_eps)
    mixed = sum_i softmax(score)[i] * v[i];  y = rms_norm(mixed)

A softmax over rows that come in turn: what was summed is scaled down when a larger score comes
(Milakov and Gimelshein, arXiv 1805.02867). ROWS of them are loaded together, so that their loads
and their reductions overlap. Query and weight are loaded before the PDL wait, as in
``rms_norm_triton.py``. Imports Triton.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compile_ext.ops.rms_norm_triton import normed, warps_of
from compile_ext.ops.triton_support import device_of, has_pdl

# 8 elements a thread each: with 4, 7168 features spill registers (Triton 3.6, SM80 to 90).
_ROWS = 2


@triton.jit  # type: ignore[untyped-decorator]
def _scores(v, query, K, key_eps, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.sum(v * query, axis) * tl.rsqrt(tl.sum(v * v, axis) / K + key_eps)


@triton.jit  # type: ignore[untyped-decorator]
def _attn_residual_kernel(  # type: ignore[no-untyped-def]
    x, blocks, query, weight, y, mixed,
    L, K, key_eps, eps,
    stride_x_m, stride_x_k, stride_blocks_m, stride_blocks_l, stride_blocks_k,
    stride_query, stride_weight,
    HAS_WEIGHT: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # whoever is launched to start early waits before it reads y
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    mask = k < K
    far = k.to(tl.int64)  # 64 bits: columns can lie far apart
    w = tl.load(weight + far * stride_weight, mask=mask, other=0.0) if HAS_WEIGHT else 0.0
    q = tl.load(query + far * stride_query, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    dtype: tl.constexpr = x.dtype.element_ty
    acc = tl.load(x + row * stride_x_m + far * stride_x_k, mask=mask, other=0.0).to(tl.float32)
    largest = _scores(acc, q, K, key_eps, 0)
    total = largest * 0 + 1  # of the exponentials; NaN where the score is
    base = blocks + row * stride_blocks_m + far[None, :] * stride_blocks_k
    for first in range(0, L, ROWS):
        i = first + tl.arange(0, ROWS)
        at = base + i[:, None].to(tl.int64) * stride_blocks_l
        v = tl.load(at, mask=(i < L)[:, None] & mask[None, :], other=0.0).to(tl.float32)
        scores = tl.where(i < L, _scores(v, q[None, :], K, key_eps, 1), float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 0))
        kept = tl.exp(largest - larger)
        each = tl.exp(scores - larger)
        acc = acc * kept + tl.sum(v * each[:, None], 0)
        total = total * kept + tl.sum(each, 0)
        largest = larger
    value = (acc / total).to(dtype)
    tl.store(mixed + row * K + k, value, mask=mask)
    # The norm is that of the mixture as it is stored.
    result = normed(value.to(tl.float32), w, K, eps, dtype, HAS_WEIGHT, ROUNDS)
    tl.store(y + row * K + k, result.to(dtype), mask=mask)


def run(
    x: Tensor,
    blocks: Tensor,
    query: Tensor,
    key_eps: float,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    *,
    prefetch: bool = False,
) -> tuple[Tensor, Tensor]:
    (m, k), length = x.shape, blocks.shape[1]
    y, mixed = x.new_empty(x.shape), x.new_empty(x.shape)
    if not m:
        return y, mixed
    block = triton.next_power_of_2(k)
    kernel: Any = _attn_residual_kernel
    with device_of(x):
        kernel[(m,)](
            x, blocks, query, weight, y, mixed,
            length, k, key_eps, eps,
            *x.stride(), *blocks.stride(), query.stride(0),
            weight.stride(0) if weight is not None else 0,
            HAS_WEIGHT=weight is not None, ROUNDS=round_before_weight, PDL=has_pdl(x),
            BLOCK=block, ROWS=min(_ROWS, triton.next_power_of_2(max(1, length))),
            num_warps=warps_of(block), launch_pdl=prefetch and has_pdl(x),
        )  # fmt: skip
    return y, mixed
