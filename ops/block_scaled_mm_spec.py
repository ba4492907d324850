"""What ``block_scaled_mm`` and its M == 1 variant share: reference, checks, kernels, contract."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import (
    batch_invariant,
    block_scaled_mm_aten,
    block_scaled_mm_deep_gemm,
    block_scaled_reference,
    checks,
    tma_rows,
    triton_support,
    ue8m0,
)
from compile_ext.ops.contract import Align, Gemm, Memory, OpContract, Pad
from compile_ext.ops.define import Kernel, never
from compile_ext.ops.errors import ShapeError
from compile_ext.ops.quantize import BLOCK, dequantize_fp8_groups, quantize_fp8_groups

MAX_TOKENS = 16  # of block_scaled_mm_small_m.py, where it is bound by the bytes of the weight
# Few columns leave most multiprocessors idle, and a library's kernel with them: N = 576, M = 64
# takes 8.2 us, DeepGEMM 9.6 (H200).
FEW_COLUMNS, MAX_TOKENS_OF_FEW_COLUMNS = 1024, 64


def block_scaled_mm_ref(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    product: block_scaled_reference.Product = torch.mm,
) -> Tensor:
    """The specification: dequantize, multiply and add in float32, round once at the end."""
    if a.dtype == torch.bfloat16:  # the kernel quantizes its own input; scale_a is not read
        a, scale_a = quantize_fp8_groups(a, use_ue8m0=scale_b.dtype == ue8m0.E8M0)
    assert scale_a is not None  # check refuses an FP8 a without it
    x = dequantize_fp8_groups(a, scale_a)
    out = block_scaled_reference.times_blocks(x, b, scale_b, product)
    return (out if bias is None else out + bias.float()).to(out_dtype)


def check(
    op: str,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    checks.dtype_in(op, "a", a, (checks.FP8, torch.bfloat16))
    checks.dtype_in(op, "b", b, (checks.FP8,))
    for name, x in (("a", a), ("b", b)):
        checks.rank_is(op, name, x, 2)
        checks.rows_contiguous(op, name, x)
    checks.same_k(op, a, b)
    block_scaled_reference.check_scale_b(op, b, scale_b)
    if a.dtype == checks.FP8:
        if scale_a is None:
            raise ShapeError(
                op,
                "a of float8_e4m3fn without scale_a",
                f"scale_a [m, ceil(k/{BLOCK})]",
                "pass what quantize_fp8_groups returned, or a bfloat16 a",
            )
        block_scaled_reference.check_scale_a(op, a, scale_a)
        checks.same_device(op, a=a, scale_a=scale_a)
    checks.same_device(op, a=a, b=b, scale_b=scale_b, bias=bias)
    checks.bias_fits(op, bias, b.shape[0])
    checks.out_dtype_is_float(op, out_dtype)


def fake(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def _why_not_small_m(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> str | None:
    reason = triton_support.why_not(a) or triton_support.why_no_fp8(a)
    if reason is not None:
        return reason
    if a.dtype != checks.FP8:
        return checks.WANTS_FP8
    are_few = checks.at_most(b.shape[0], FEW_COLUMNS)
    most = MAX_TOKENS_OF_FEW_COLUMNS if are_few else MAX_TOKENS
    if not checks.at_most(a.shape[0], most):
        return f"takes up to {most} tokens for N={b.shape[0]}, M is {a.shape[0]}"
    return tma_rows.why_not(a=a, b=b)


KERNELS = (
    # H200, times as fast as DeepGEMM (docs/benchmarks.md): 1.1 to 3.4 at one token, 0.8 to 2.2 at
    # 16. What no table has measured runs in this order.
    Kernel(
        "triton_small_m",
        _why_not_small_m,
        triton_support.run_of("block_scaled_mm_small_m"),
        prefetches=True,
    ),
    Kernel("deep_gemm", block_scaled_mm_deep_gemm.why_not, block_scaled_mm_deep_gemm.run),
    # SM90
    Kernel(
        "aten", why_not=block_scaled_mm_aten.why_not, run=block_scaled_mm_aten.run, compiles=False
    ),
    Kernel("triton", triton_support.why_not, triton_support.run_of("block_scaled_mm_triton")),
    Kernel("reference", why_not=never, run=block_scaled_mm_ref, compiles=False),
    batch_invariant.kernel(batch_invariant.tiled("block_scaled_mm_triton"), block_scaled_mm_ref),
)

CONTRACT = OpContract(
    gemm=Gemm(a="a", b="b", scale_a="scale_a", scale_b="scale_b", bias="bias"),
    # 16 bytes: the smallest row that TMA and cuBLASLt address. Partial 128-blocks are the op's
    # own affair.
    align={
        "n": Align(16, pad={"b": 0, "scale_b": Pad(1.0, axis=0, block=BLOCK), "bias": 0}),
        "k": Align(
            16,
            pad={
                "a": 0,
                "b": 0,
                "scale_a": Pad(1.0, axis=1, block=BLOCK),
                "scale_b": Pad(1.0, axis=1, block=BLOCK),
            },
        ),
    },
    # cuBLASLt reads scales in rows of a multiple of 4 (``block_scaled_mm_aten.py``).
    memory={"scale_b": Memory(stride=block_scaled_mm_aten.SCALE_STRIDE)},
    unread={"scale_a": lambda a, **_: a.dtype == torch.bfloat16},
    prewait_reads=("b", "scale_b", "bias"),
)
