"""The router GEMM through cuBLAS: float32 accumulation and output, on CUDA. Of a bfloat16 and a
float32 operand the first is converted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compile_ext.ops import device, float32_matmul
from compile_ext.ops.checks import is_zero


def why_not(a: Tensor, b: Tensor, bias: Tensor | None) -> str | None:
    if not device.is_gpu(a):
        return f"torch.mm(out_dtype=) runs on CUDA, the tensors are on {a.device.type}"
    if any(is_zero(size) for size in (*a.shape, *b.shape)):
        return "a dimension is 0"
    return float32_matmul.why_rounded(a, b)


def run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    rows, columns = a.reshape(-1, a.shape[-1]), b.t()
    if a.dtype == b.dtype == torch.bfloat16:
        logits = torch.mm(rows, columns, out_dtype=torch.float32)
    else:
        logits = torch.mm(rows.float(), columns.float())
    if bias is not None:
        logits += bias
    return logits.view(*a.shape[:-1], b.shape[0])
