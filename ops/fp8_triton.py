"""Device functions on e4m3 for the Triton kernels: decoding, and quantization in groups of 128.

Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compile_ext.ops import quantize as quantize_reference

FP8_MAX = tl.constexpr(quantize_reference.FP8_MAX)
AMAX_FLOOR = tl.constexpr(quantize_reference.AMAX_FLOOR)


@triton.jit  # type: ignore[untyped-decorator]
def operand(x, HAS_FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """What ``tl.dot`` gets for e4m3 values: themselves; of their bytes, where the device knows no
    e4m3, float16, which holds each value exactly."""
    if HAS_FP8:
        decoded = x
    else:
        bits = x.to(tl.uint16)
        # Exponent and mantissa in their places in float16, whose exponent has a bias of 15, not 7:
        # 2^8 too small, subnormals too.
        magnitude = ((bits & 0x7F) << 7).to(tl.float16, bitcast=True) * 256.0
        signed = tl.where((bits & 0x80) != 0, -magnitude, magnitude)
        decoded = tl.where((bits & 0x7F) == 0x7F, float("nan"), signed).to(tl.float16)
    return decoded


@triton.jit
def scale_value(x):  # type: ignore[no-untyped-def]
    """A scale in float32: itself, or what a byte of float8_e8m0fnu means."""
    if x.dtype == tl.uint8:
        byte = x.to(tl.uint32)
        # 2^-127 is a subnormal, and all ones would be an infinity.
        special = tl.where(byte == 0, 0x00400000, 0x7FC00000).to(tl.uint32)
        bits = tl.where((byte == 0) | (byte == 0xFF), special, byte << 23)
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = x
    return value


@triton.jit  # type: ignore[untyped-decorator]
def quantize(  # type: ignore[no-untyped-def]
    x, axis: tl.constexpr, HAS_FP8: tl.constexpr, USE_UE8M0: tl.constexpr = False
):  # fmt: skip
    """``quantize_fp8_groups`` of one group along ``axis``: the operand for ``tl.dot``, and the
    scale, whose ``axis`` has size 1. A NaN spreads over its group."""
    x = x.to(tl.float32)
    # tl.max leaves NaN out.
    is_nan = tl.max((x != x).to(tl.int32), axis, keep_dims=True) > 0
    amax = tl.maximum(tl.max(tl.abs(x), axis, keep_dims=True), AMAX_FLOOR)
    scale = tl.where(is_nan, float("nan"), amax)
    scale = tl.div_rn(scale, tl.full(scale.shape, FP8_MAX, tl.float32))
    if USE_UE8M0:
        power = (scale.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(power < scale, power * 2, scale)
    # div_rn: of `/` the last bit is free, and a value between two e4m3 numbers would fall to
    # another one than the reference's.
    x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    x = tl.clamp(x, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    rounded = x.to(tl.float8e4nv) if HAS_FP8 else round_to_e4m3(x)
    return rounded, scale


@triton.jit
def round_to_e4m3(x):  # type: ignore[no-untyped-def]
    """float32 within +-448 rounded to the nearest e4m3 value, ties to even, as float16."""
    # 3 bits of mantissa: the spacing is 2^-3 of the power of two below, and 2^-9 of the smallest.
    bits = x.to(tl.uint32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 0xFF).to(tl.int32), 127 - 6)
    # Adding 1.5 * 2^23 spacings leaves the bits of one spacing and up, rounded to even.
    magic = (((exponent - 3 + 23) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return ((x + magic) - magic).to(tl.float16)


@triton.jit
def e4m3_bytes(x):  # type: ignore[no-untyped-def]
    """The bytes of e4m3 values that float16 holds: the inverse of ``operand``."""
    bits = (x * 0.00390625).to(tl.float16).to(tl.uint16, bitcast=True)  # 2^-8
    byte = ((bits >> 7) & 0x7F) | ((bits >> 8) & 0x80)
    return tl.where(x == x, byte, 0x7F).to(tl.uint8)
