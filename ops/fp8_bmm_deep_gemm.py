"""``fp8_bmm`` through DeepGEMM's ``fp8_einsum`` on Hopper: its kernel 1D2D with a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import deep_gemm_operands, deep_gemm_support
from compile_ext.ops.triton_support import device_of


def why_not(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype
) -> str | None:
    return deep_gemm_operands.why_not(a, b, scale_a, scale_b, out_dtype)


def run(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[1], dtype=out_dtype)
    with device_of(a):
        # The scales of one head lie together: it is the heads that are the batch.
        scale = deep_gemm_operands.column_major(scale_a.transpose(0, 1)).transpose(0, 1)
        weight = b, deep_gemm_operands.rows(scale_b)
        deep_gemm_support.call("fp8_einsum", "bhr,hdr->bhd", (a, scale), weight, out)
    return out
