"""``router_gemm`` of one to eight tokens as dot products, of bfloat16 and float32. Imports Triton.

D[m, n] = sum_k A[m, k] * B[n, k] + bias[n]

A program has COLUMNS columns and all of K. Products and sums are those of float32: of bfloat16 they
are exact, and a float32 weight is read as it is. The first AHEAD steps of the weight are loaded and
converted before the wait for the kernel in front (programmatic dependent launch, CUDA Programming
Guide); the activation, and every store, come after it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compile_ext.ops.contract import m_of
from compile_ext.ops.triton_support import device_of, has_pdl

_STEP, _WARPS = 1024, 4  # 8 values a thread: one load of 16 bytes of bfloat16
_AHEAD = 8  # 64 registers a column in float32


@triton.jit  # type: ignore[untyped-decorator]
def _weight(rows, step, in_n, K, STRIDE_K, STEP: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    k = (step * STEP + tl.arange(0, STEP)).to(tl.int64)
    at = rows[:, None] + (k * STRIDE_K)[None, :]
    mask = in_n[:, None] if EVEN else in_n[:, None] & (k < K)[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _small_m_kernel(  # type: ignore[no-untyped-def]
    a, b, bias, out,
    M, N, K,
    stride_a_m, stride_a_k, stride_b_n, stride_b_k, stride_bias,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr, EVEN: tl.constexpr, LOOPS: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # whoever is launched to start early waits before it reads out
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_n = n < N
    # 64 bits: rows and columns can lie far apart.
    rows = b + n.to(tl.int64) * stride_b_n
    ahead = ()
    for step in tl.static_range(AHEAD):
        ahead += (_weight(rows, step, in_n, K, stride_b_k, STEP, EVEN),)  # type: ignore[assignment]
    added = tl.zeros((COLUMNS,), tl.float32)
    if HAS_BIAS:
        added += tl.load(bias + n.to(tl.int64) * stride_bias, mask=in_n, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    for token in tl.static_range(TOKENS):
        row = a + tl.minimum(token, M - 1).to(tl.int64) * stride_a_m
        sums = tl.zeros((COLUMNS, STEP), tl.float32)
        for step in tl.static_range(AHEAD):
            k = (step * STEP + tl.arange(0, STEP)).to(tl.int64)
            x = tl.load(row + k * stride_a_k, mask=k < K, other=0.0).to(tl.float32)
            sums += ahead[step] * x[None, :]
        if LOOPS:
            for step in range(AHEAD, tl.cdiv(K, STEP)):
                k = (step * STEP + tl.arange(0, STEP)).to(tl.int64)
                x = tl.load(row + k * stride_a_k, mask=k < K, other=0.0).to(tl.float32)
                sums += _weight(rows, step, in_n, K, stride_b_k, STEP, EVEN) * x[None, :]
        result = tl.sum(sums, 1) + added
        tl.store(out + token * N + n, result, mask=in_n & (token < M))


def run(a: Tensor, b: Tensor, bias: Tensor | None, *, prefetch: bool = False) -> Tensor:
    n, k = b.shape
    out = a.new_empty(*a.shape[:-1], n, dtype=torch.float32)
    if not out.numel():
        return out
    rows = a.reshape(m_of(a), k)
    m = rows.shape[0]
    tokens = triton.next_power_of_2(m)
    steps = triton.cdiv(k, _STEP)
    columns = 2 if tokens <= 2 else 1
    kernel: Any = _small_m_kernel
    with device_of(a):
        kernel[(triton.cdiv(n, columns),)](
            rows, b, bias, out,
            m, n, k,
            *rows.stride(), *b.stride(), 0 if bias is None else bias.stride(0),
            HAS_BIAS=bias is not None, PDL=has_pdl(a), EVEN=k % _STEP == 0, LOOPS=steps > _AHEAD,
            COLUMNS=columns, TOKENS=tokens, STEP=_STEP, AHEAD=min(steps, _AHEAD),
            num_warps=_WARPS, launch_pdl=prefetch and has_pdl(a),
        )  # fmt: skip
    return out
