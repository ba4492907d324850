"""``block_scaled_mm`` through ``torch._scaled_mm`` (cuBLASLt's 1x128 by 128x128 scaling) on Hopper.

What cuBLASLt takes was found by running it (H200, torch 2.11, CUDA 13.0): M in multiples of 4, and
scale_a with strides (1, M). With a partial last block of K (K = 576) it returns wrong numbers,
13 to 22 % off, without an error: such shapes are left to the reference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compile_ext.ops.checks import is_zero
from compile_ext.ops.quantize import BLOCK, quantize_fp8_groups

CAPABILITY = (9, 0)
_M_MULTIPLE = 4  # M must be a multiple of it


def why_not(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> str | None:
    if a.device.type != "cuda":
        return f"runs on CUDA, the tensors are on {a.device.type}"
    if (found := torch.cuda.get_device_capability(a.device)) != CAPABILITY:
        return f"needs compute capability 9.0, the device has {found[0]}.{found[1]}"
    n, k = b.shape
    if n % BLOCK or k % BLOCK:
        return f"needs N and K in multiples of {BLOCK}, found N={n}, K={k}"
    if a.stride(0) % 16 or b.stride(0) % 16:
        return "needs row strides in multiples of 16 elements"
    if out_dtype != torch.bfloat16:
        return f"gives bfloat16 only, wanted {out_dtype}"
    if bias is not None:
        return "takes no bias"
    if is_zero(a.shape[0]):
        return "M is 0"
    return None


def run(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    if a.dtype == torch.bfloat16:
        a, scale_a = quantize_fp8_groups(a)
    assert scale_a is not None
    m, extra = a.shape[0], -a.shape[0] % _M_MULTIPLE
    if extra:
        a = F.pad(a, (0, 0, 0, extra))
    # The rows added to a are cut off again: what their scales hold does not matter.
    columns = a.new_empty(scale_a.shape[1], m + extra, dtype=torch.float32).t()
    columns[:m].copy_(scale_a)
    out = torch._scaled_mm(
        a, b.t(), scale_a=columns, scale_b=scale_b.contiguous().t(), out_dtype=out_dtype
    )
    return out[:m].contiguous() if extra else out
