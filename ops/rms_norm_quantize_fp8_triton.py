"""``rms_norm_quantize_fp8`` and ``add_rms_norm_quantize_fp8``: one row a program, read once.

    r = 1 / sqrt(mean_k(x[k]^2) + eps);  y[k] = x[k] * r * weight[k];  q, scale = groups of 128 of y

The row is held as [groups, 128], so that the mean reduces both axes and the scales one. The weight
is loaded before the PDL wait, as in ``rms_norm_triton.py``. Imports Triton.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compile_ext.ops.fp8_triton import e4m3_bytes, quantize
from compile_ext.ops.quantize import blocks_of
from compile_ext.ops.rms_norm_quantize_fp8 import fake_quantized
from compile_ext.ops.triton_support import device_of, has_fp8, has_pdl, readable

_ELEMENTS_OF_A_WARP = 1024  # 32 a thread, in float32


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_quantize_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, q, scale, total,
    K, eps,
    stride_x_m, stride_x_k, stride_residual_m, stride_residual_k, stride_weight, stride_scale_k,
    ADDS: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUNDS: tl.constexpr, HAS_FP8: tl.constexpr,
    USE_UE8M0: tl.constexpr, PDL: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()  # whoever is launched to start early waits before it reads q
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    mask = k < K
    far = k.to(tl.int64)  # 64 bits: columns can lie far apart
    if HAS_WEIGHT:
        w = tl.load(weight + far * stride_weight, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
    dtype = x.dtype.element_ty
    value = tl.load(x + row * stride_x_m + far * stride_x_k, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        at = row * stride_residual_m + far * stride_residual_k
        value += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        # The norm is that of the sum as it is stored.
        stored = value.to(dtype)
        tl.store(total + row * K + k, stored, mask=mask)
        value = stored.to(tl.float32)
    mean = tl.sum(tl.sum(value * value, 1), 0) / K
    y = value * tl.rsqrt(mean + eps)
    if HAS_WEIGHT:
        if ROUNDS:
            y = y.to(dtype).to(tl.float32)
        y *= w.to(tl.float32)
    rounded, scales = quantize(y.to(dtype), 1, HAS_FP8, USE_UE8M0)
    if HAS_FP8:
        tl.store(q + row * K + k, rounded, mask=mask)
    else:
        tl.store(q + row * K + k, e4m3_bytes(rounded), mask=mask)
    at = row + group[:, None].to(tl.int64) * stride_scale_k
    tl.store(scale + at, scales, mask=group[:, None] * 128 < K)


def run(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    use_ue8m0: bool = False,
    *,
    prefetch: bool = False,
) -> tuple[Tensor, Tensor]:
    q, scale = fake_quantized(x)
    _launch(x, None, weight, eps, round_before_weight, use_ue8m0, q, scale, None, prefetch)
    return q, scale


def run_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    round_before_weight: bool,
    use_ue8m0: bool = False,
    *,
    prefetch: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    q, scale = fake_quantized(x)
    total = x.new_empty(x.shape)
    _launch(x, residual, weight, eps, round_before_weight, use_ue8m0, q, scale, total, prefetch)
    return q, scale, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    rounds: bool,
    use_ue8m0: bool,
    q: Tensor,
    scale: Tensor,
    total: Tensor | None,
    prefetch: bool,
) -> None:
    m, k = x.shape
    if not m:
        return
    groups = triton.next_power_of_2(blocks_of(k))
    warps = min(16, max(4, triton.next_power_of_2(groups * 128 // _ELEMENTS_OF_A_WARP)))
    kernel: Any = _rms_norm_quantize_kernel
    with device_of(x):
        kernel[(m,)](
            x, residual, weight, readable(q), scale, total,
            k, eps,
            *x.stride(), *(residual.stride() if residual is not None else (0, 0)),
            weight.stride(0) if weight is not None else 0, scale.stride(1),
            ADDS=residual is not None, HAS_WEIGHT=weight is not None, ROUNDS=rounds,
            HAS_FP8=has_fp8(x), USE_UE8M0=use_ue8m0, PDL=has_pdl(x), GROUPS=groups,
            num_warps=warps, launch_pdl=prefetch and has_pdl(x),
        )  # fmt: skip
