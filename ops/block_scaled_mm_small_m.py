"""``block_scaled_mm`` for few tokens, the shape of decode: bound by the bytes of the weight.

D[m, n] = sum_g scale_a[m, g] * scale_b[n // 128, g] * (sum_{k in g} A[m, k] * B[n, k]) + bias[n]

A program computes COLUMNS columns of the result over all of K, so that N = 576 still occupies 36
multiprocessors, and its WARPS divide K among them: the product is a batch of WARPS products, one
a group of 128, summed at the end in a fixed order.

Gluon, Triton's lower language, because it names layouts. ``mma.m16n8k16`` wants of each thread 2
neighbours in k here and 2 there; but the order of k is free as long as both operands share it. With
16 neighbours a thread (``_K_WIDTH``) both go from global memory to the tensor cores in loads of 16
bytes, and never through shared memory. Written for ``tl.dot``, the same product stores each value
to shared memory as float16 and reads it back. H200, weights fetched early, us a call, N and K, M:

    576, 7168   M = 8  4.1 -> 3.4
    2112, 7168  M = 8  6.5 -> 6.4
    4096, 7168  M = 8  9.7 -> 10.3

What was tried beside it, there: a ring of 4 to 8 tiles in shared memory, filled by cp.async, takes
1.1 to 2.2 times as long (the next kernel's blocks find no room, and each step has a barrier); all
steps unrolled with a ring of tiles in registers, as long up to K = 7168 and 1.2 times at K = 16384
(instructions that run once each).

The weight's first AHEAD steps are loaded before everything else. With ``prefetch`` that is before
the wait for the kernel in front (programmatic dependent launch, CUDA Programming Guide): the
activation comes after it, and every store. Imports Triton.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compile_ext.ops.quantize import BLOCK, blocks_of
from compile_ext.ops.triton_support import device_of, has_pdl, readable

MEASURED = Path(__file__).with_suffix(".json")
_K_WIDTH = gl.constexpr(16)


class Config(NamedTuple):
    """How a call is cut.

    Args:
        columns: of the result, for one program: 16 or 32. Divides 128, the rows of a weight scale.
        tokens: of the result, for one program: 8, 16 or 32.
        warps: that divide K among them.
        ahead: steps of ``128 * warps`` features whose weight is loaded at once, before the wait.
        later: steps a round of the loop over what is left of K.
        registers: at most, for a thread; None for as many as it takes.
    """

    columns: int
    tokens: int
    warps: int
    ahead: int
    later: int = 1
    registers: int | None = None


def configure(m: int, n: int, k: int) -> Config:
    """The configuration of a call: the fastest for a measured shape, else that of its like."""
    for last, config in _measured().get((n, k), ()):
        if m <= last:
            return config
    tokens = 8 if m <= 8 else 16
    if n <= 4096:
        return Config(16, tokens, 8, 7)
    if n <= 8192:
        return Config(16, tokens, 4, 4, registers=128 if m <= 8 else None)
    return Config(32, tokens, 2, 2)


@functools.cache
def _measured() -> dict[tuple[int, int], list[tuple[int, Config]]]:
    """For N and K, the last M of each range and its configuration: ``sweep_small_m.py --ship``."""
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    found: dict[tuple[int, int], list[tuple[int, Config]]] = {}
    for row in rows:
        found.setdefault((row["n"], row["k"]), []).append((row["last_m"], Config(*row["config"])))
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _load(at, rows, k, K, MASK: gl.constexpr, MASK_K: gl.constexpr):  # type: ignore[no-untyped-def]
    if MASK and MASK_K:
        x = gl.load(at, mask=rows & (k < K), other=0.0)
    elif MASK:
        x = gl.load(at, mask=rows, other=0.0)
    elif MASK_K:
        x = gl.load(at, mask=k < K, other=0.0)
    else:
        x = gl.load(at)
    return x


@gluon.jit
def _scale(x):  # type: ignore[no-untyped-def]
    """``scale_value`` of fp8_triton.py, in Gluon."""
    if x.dtype == gl.uint8:
        byte = x.to(gl.uint32)
        # 2^-127 is a subnormal, and all ones would be an infinity.
        special = gl.where(byte == 0, 0x00400000, 0x7FC00000).to(gl.uint32)
        bits = gl.where((byte == 0) | (byte == 0xFF), special, byte << 23)
        value = bits.to(gl.float32, bitcast=True)
    else:
        value = x
    return value


@gluon.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    at, n, k, step, N, K,
    MASK_N: gl.constexpr, MASK_K: gl.constexpr, STRIDE: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """The weight of STEPS steps, ``[WARPS, COLUMNS, 128]`` each."""
    weights = ()
    for i in gl.static_range(STEPS):
        past = (step + i) * STRIDE
        weights += (_load(at + past, n < N, k + past, K, MASK_N, MASK_K),)  # type: ignore[assignment]
    return weights


@gluon.jit  # type: ignore[untyped-decorator]
def _products(  # type: ignore[no-untyped-def]
    weights, x_at, m, k, scale_x_at, scale_w_at, scale_m, group, step, M, K,
    stride_scale_a_k, stride_scale_b_k,
    MASK_M: gl.constexpr, MASK_K: gl.constexpr, STEPS: gl.constexpr,
    COLUMNS: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The products ``[WARPS, COLUMNS, TOKENS]`` of STEPS steps, scaled and summed."""
    zero = gl.full([WARPS, COLUMNS, TOKENS], 0.0, gl.float32, mma)
    total = zero
    for i in gl.static_range(STEPS):
        past = (step + i) * (WARPS * 128)
        x = _load(x_at + past, m < M, k + past, K, MASK_M, MASK_K)
        g = group + (step + i) * WARPS
        at = scale_x_at + g.to(gl.int64) * stride_scale_a_k
        scale = _scale(_load(at, scale_m < M, g * 128, K, MASK_M, MASK_K))
        at = scale_w_at + g * stride_scale_b_k
        scale *= _scale(_load(at, scale_m < M, g * 128, K, False, MASK_K))
        # e4m3 in float16 is exact, and so is each product of two in float32.
        total += mma_v2(weights[i].to(gl.float16), x.to(gl.float16), zero) * scale
    return total


@gluon.jit  # type: ignore[untyped-decorator]
def _small_m_kernel(  # type: ignore[no-untyped-def]
    a, b, scale_a, scale_b, bias, out,
    M, N, K,
    stride_a, stride_b, stride_scale_a_m, stride_scale_a_k, stride_scale_b_n, stride_scale_b_k,
    stride_bias,
    HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
    MASK_M: gl.constexpr, MASK_N: gl.constexpr, MASK_K: gl.constexpr, LOOPS: gl.constexpr,
    COLUMNS: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    ROUND: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    first_n, first_m = gl.program_id(0) * COLUMNS, gl.program_id(1) * TOKENS

    of_w: gl.constexpr = gl.DotOperandLayout(0, mma, _K_WIDTH)  # [WARPS, COLUMNS, 128]
    group = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, of_w)))[:, None, None]
    w_k = group * 128 + gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, of_w)))[None, None, :]
    n = first_n + gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(2, of_w)))[None, :, None]
    # 64 bits: an LM head has more than 2^31 elements, and rows of a can lie far apart.
    w_at = b + n.to(gl.int64) * stride_b + w_k
    weights = _weights(w_at, n, w_k, 0, N, K, MASK_N, MASK_K, WARPS * 128, AHEAD)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()

    of_x: gl.constexpr = gl.DotOperandLayout(1, mma, _K_WIDTH)  # [WARPS, 128, TOKENS]
    group = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, of_x)))[:, None, None]
    x_k = group * 128 + gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, of_x)))[None, :, None]
    m = first_m + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, of_x)))[None, None, :]
    x_at = a + m.to(gl.int64) * stride_a + x_k
    group = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, mma)))[:, None, None]
    scale_m = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, mma)))[None, None, :]
    scale_m += first_m
    scale_x_at = scale_a + scale_m.to(gl.int64) * stride_scale_a_m
    scale_w_at = scale_b + first_n // 128 * stride_scale_b_n
    acc = _products(
        weights, x_at, m, x_k, scale_x_at, scale_w_at, scale_m, group, 0, M, K,
        stride_scale_a_k, stride_scale_b_k,
        MASK_M, MASK_K, AHEAD, COLUMNS, TOKENS, WARPS, mma,
    )  # fmt: skip
    if LOOPS:
        for step in range(AHEAD, gl.cdiv(K, WARPS * 128), ROUND):
            more = _weights(w_at, n, w_k, step, N, K, MASK_N, MASK_K, WARPS * 128, ROUND)
            acc += _products(
                more, x_at, m, x_k, scale_x_at, scale_w_at, scale_m, group, step, M, K,
                stride_scale_a_k, stride_scale_b_k,
                MASK_M, MASK_K, ROUND, COLUMNS, TOKENS, WARPS, mma,
            )  # fmt: skip

    result = gl.sum(acc, 0)
    of_out: gl.constexpr = gl.SliceLayout(0, mma)
    n = first_n + gl.arange(0, COLUMNS, gl.SliceLayout(1, of_out))
    m = first_m + gl.arange(0, TOKENS, gl.SliceLayout(0, of_out))
    if HAS_BIAS:
        added = gl.load(bias + n.to(gl.int64) * stride_bias, mask=n < N, other=0.0)
        result += added.to(gl.float32)[:, None]
    where = out + m[None, :].to(gl.int64) * N + n[:, None]
    gl.store(where, result.to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    prefetch: bool = False,
    config: Config | None = None,
) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    out = a.new_empty(m, n, dtype=out_dtype)
    if not out.numel():
        return out
    assert scale_a is not None  # why_not wants an FP8 a, which has one
    columns, tokens, warps, ahead, later, registers = config or configure(m, n, k)
    steps = triton.cdiv(blocks_of(k), warps)
    ahead = max(1, min(ahead, steps))
    # Whole rounds of whole steps: nothing lies beyond K.
    is_even = k > 0 and k % (warps * BLOCK) == 0 and (steps - ahead) % later == 0
    kernel: Any = _small_m_kernel
    with device_of(a):
        kernel[(triton.cdiv(n, columns), triton.cdiv(m, tokens))](
            a, b, readable(scale_a), readable(scale_b), bias, out,
            m, n, k,
            a.stride(0), b.stride(0), *scale_a.stride(), *scale_b.stride(),
            0 if bias is None else bias.stride(0),
            HAS_BIAS=bias is not None, PDL=has_pdl(a),
            MASK_M=m % tokens != 0, MASK_N=n % columns != 0,
            MASK_K=not is_even, LOOPS=steps > ahead,
            COLUMNS=columns, TOKENS=tokens, WARPS=warps, AHEAD=ahead, ROUND=later,
            num_warps=warps, maxnreg=registers, launch_pdl=prefetch and has_pdl(a),
        )  # fmt: skip
    return out
