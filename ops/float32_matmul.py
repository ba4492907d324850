"""How exactly torch multiplies float32 matrices: users may allow operands that are rounded first.

``torch.backends.cuda.matmul.fp32_precision`` (TF32 on CUDA) and ``torch.backends.mkldnn.matmul``'s
(bfloat16 or TF32 on the CPU), which ``torch.set_float32_matmul_precision`` and ``allow_tf32`` set
as well. bfloat16 operands are exact in either, so it concerns float32 ones alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def why_rounded(a: Tensor, b: Tensor) -> str | None:
    """Why ``torch.mm`` of these as float32 would round an operand, or None."""
    if torch.float32 not in (a.dtype, b.dtype):
        return None
    backend = "cuda" if a.device.type == "cuda" else "mkldnn"
    precision = getattr(torch.backends, backend).matmul.fp32_precision
    if precision not in ("tf32", "bf16"):
        return None
    return f"torch multiplies float32 in {precision} (torch.backends.{backend}.matmul)"
