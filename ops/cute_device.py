"""What CuTe DSL kernels share on the device: bits of registers, the tensor cores, a warp's sums.

Imports CuTe DSL: only the compiler imports this module.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T, dsl_user_op


@dsl_user_op
def bits_of(x, *, loc=None, ip=None):
    """A float32 as the int32 of its bits."""
    value = Float32(x).ir_value(loc=loc, ip=ip)
    return Int32(llvm.bitcast(T.i32(), value, loc=loc, ip=ip))


@dsl_user_op
def float_of(bits, *, loc=None, ip=None):
    """The float32 that has the bits of an int32."""
    value = Int32(bits).ir_value(loc=loc, ip=ip)
    return Float32(llvm.bitcast(T.f32(), value, loc=loc, ip=ip))


def low(pair):
    """The first of two bfloat16 in a register, as float32."""
    return float_of(pair << 16)


def high(pair):
    """The second."""
    return float_of(pair & Int32(-65536))


@dsl_user_op
def pack(first, second, *, loc=None, ip=None):
    """Two float32, rounded to bfloat16, in a register."""
    values = [Float32(x).ir_value(loc=loc, ip=ip) for x in (second, first)]
    found = llvm.inline_asm(
        T.i32(), values, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f",
        has_side_effects=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return Int32(found)


@dsl_user_op
def select(condition, x, y, *, loc=None, ip=None):
    """x where the condition holds, else y; of one type, without a branch."""
    values = [type(x)(v).ir_value(loc=loc, ip=ip) for v in (x, y)]
    return type(x)(arith.select(condition.ir_value(loc=loc, ip=ip), *values, loc=loc, ip=ip))


@dsl_user_op
def mma_m16n8k16(a, b, c, *, loc=None, ip=None):
    """``c + a @ b``: a four, b two registers of bfloat16 pairs, c four float32 (PTX ISA, "Matrix
    fragments for mma.m16n8k16")."""
    pairs = [Int32(x).ir_value(loc=loc, ip=ip) for x in (*a, *b)]
    sums = [Float32(x).ir_value(loc=loc, ip=ip) for x in c]
    found = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * 4),
        [*pairs, *sums],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
        " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip,
    )  # fmt: skip
    return [Float32(llvm.extractvalue(T.f32(), found, [i], loc=loc, ip=ip)) for i in range(4)]


def sums_of_a_warp(values, lane):
    """Sum each of 2^n values over a warp, in a butterfly that halves what a lane still holds.

    Args:
        values: a list, one float32 a sum.

    Returns:
        The sums that this lane holds, and the number of the first: lanes that differ only in bits
        below ``32 // len(values)`` hold the same ones.
    """
    first, offset = Int32(0), 16
    while offset:
        if len(values) > 1:
            half = len(values) // 2
            upper = (lane & offset) != 0
            kept = [select(upper, values[i + half], values[i]) for i in range(half)]
            sent = [select(upper, values[i], values[i + half]) for i in range(half)]
            first += select(upper, Int32(half), Int32(0))
        else:
            kept = sent = values
        got = [cute.arch.shuffle_sync_bfly(x, offset=offset) for x in sent]
        values = [x + y for x, y in zip(kept, got, strict=True)]
        offset //= 2
    return values, first
