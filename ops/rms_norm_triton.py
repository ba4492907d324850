"""``rms_norm`` and ``add_rms_norm``: one row a program, read once and kept in registers.

    r = 1 / sqrt(mean_k(x[k]^2) + eps);  y[k] = x[k] * r * weight[k]

With programmatic dependent launch (CUDA Programming Guide) the next kernel may start at once, and
this one's weight is loaded before the wait for the kernel in front; all else stands behind the
wait. Imports Triton.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compile_ext.ops.triton_support import device_of, has_pdl

_ELEMENTS_OF_A_WARP = 256  # 8 a thread: one load of 16 bytes of bfloat16


@triton.jit  # type: ignore[untyped-decorator]
def normed(  # type: ignore[no-untyped-def]
    value, weight, K, eps,
    dtype: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """The norm of a row of K float32 values (zeros behind them), before its last rounding."""
    y = value * tl.rsqrt(tl.sum(value * value, 0) / K + eps)
    if HAS_WEIGHT:
        if ROUNDS:
            y = y.to(dtype).to(tl.float32)
        y *= weight.to(tl.float32)
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, y, total,
    K, eps,
    stride_x_m, stride_x_k, stride_residual_m, stride_residual_k, stride_weight,
    ADDS: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUNDS: tl.constexpr,
    PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # whoever is launched to start early waits before it reads y
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    mask = k < K
    far = k.to(tl.int64)  # 64 bits: columns can lie far apart
    w = tl.load(weight + far * stride_weight, mask=mask, other=0.0) if HAS_WEIGHT else 0.0
    if PDL:
        gdc_wait()
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + row * stride_x_m + far * stride_x_k, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        at = row * stride_residual_m + far * stride_residual_k
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        # The norm is that of the sum as it is stored.
        stored = value.to(dtype)
        tl.store(total + row * K + k, stored, mask=mask)
        value = stored.to(tl.float32)
    result = normed(value, w, K, eps, dtype, HAS_WEIGHT, ROUNDS)
    tl.store(y + row * K + k, result.to(dtype), mask=mask)


def run(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    *,
    prefetch: bool = False,
) -> Tensor:
    y = x.new_empty(x.shape)
    _launch(x, None, weight, eps, round_before_weight, y, None, prefetch)
    return y


def run_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    *,
    prefetch: bool = False,
) -> tuple[Tensor, Tensor]:
    y, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, eps, round_before_weight, y, total, prefetch)
    return y, total


def warps_of(block: int) -> int:
    """For a row of ``block`` elements: one program is all that runs at one token."""
    return min(32, max(4, block // _ELEMENTS_OF_A_WARP))


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    rounds: bool,
    y: Tensor,
    total: Tensor | None,
    prefetch: bool,
) -> None:
    m, k = x.shape
    if not m:
        return
    block = triton.next_power_of_2(k)
    kernel: Any = _rms_norm_kernel
    with device_of(x):
        kernel[(m,)](
            x, residual, weight, y, total,
            k, eps,
            *x.stride(), *(residual.stride() if residual is not None else (0, 0)),
            weight.stride(0) if weight is not None else 0,
            ADDS=residual is not None, HAS_WEIGHT=weight is not None, ROUNDS=rounds,
            PDL=has_pdl(x), BLOCK=block,
            num_warps=warps_of(block), launch_pdl=prefetch and has_pdl(x),
        )  # fmt: skip
