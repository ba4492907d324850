"""The router GEMM through cuBLAS: bfloat16 operands, float32 accumulation and output, on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops.checks import is_zero


def why_not(a: Tensor, b: Tensor, bias: Tensor | None) -> str | None:
    if a.device.type != "cuda":
        return f"torch.mm(out_dtype=) runs on CUDA, the tensors are on {a.device.type}"
    if any(is_zero(size) for size in (*a.shape, *b.shape)):
        return "a dimension is 0"
    return None


def run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    logits = torch.mm(a.reshape(-1, a.shape[-1]), b.t(), out_dtype=torch.float32)
    if bias is not None:
        logits += bias
    return logits.view(*a.shape[:-1], b.shape[0])
