"""One output tile of a block-scaled product: what the Triton kernels of dense, grouped and batched
weights share. Imports Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from compile_ext.ops.fp8_triton import operand, quantize, scale_value


@triton.jit  # type: ignore[untyped-decorator]
def tile_product(  # type: ignore[no-untyped-def]
    a_rows, in_m, b_rows, in_n, K,
    scale_a_rows, stride_scale_a_k, scale_b, stride_scale_b_k,
    QUANTIZES: tl.constexpr, HAS_FP8: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """sum_g scale_a[m, g] * scale_b[g] * (sum_{k in g} A[m, k] * B[n, k]), float32.

    a_rows [BLOCK_M], b_rows [BLOCK_N] and scale_a_rows [BLOCK_M] point at the first element of each
    row; in_m and in_n say which rows there are. scale_b points at the first scale of the columns,
    which lie in one block of 128. The groups g of 128 are the steps of the loop: each product is
    scaled in float32 before it is added. Scales are float32, or bytes of e8m0. With QUANTIZES, a is
    bfloat16 and is quantized here, with scales of the same format as scale_b.
    """
    UE8M0: tl.constexpr = scale_b.dtype.element_ty == tl.uint8
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(tl.cdiv(K, 128)):
        k = group * 128 + tl.arange(0, 128)
        mask_x, mask_w = in_m[:, None], in_n[None, :]
        if not EVEN_K:
            mask_x, mask_w = mask_x & (k < K)[None, :], mask_w & (k < K)[:, None]
        x = tl.load(a_rows[:, None] + k[None, :], mask=mask_x, other=0.0)
        w = tl.load(b_rows[None, :] + k[:, None], mask=mask_w, other=0.0)
        if QUANTIZES:
            x, scale = quantize(x, 1, HAS_FP8, UE8M0)
        else:
            x = operand(x, HAS_FP8)
            scale = tl.load(scale_a_rows + group * stride_scale_a_k, mask=in_m, other=0)
            scale = scale_value(scale)[:, None]
        scale *= scale_value(tl.load(scale_b + group * stride_scale_b_k))
        acc += tl.dot(x, operand(w, HAS_FP8)) * scale
    return acc
