"""What the tests of fuse_norm_quantize build their graphs from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PASS = "fuse_norm_quantize"
K, EPS = 256, 1e-6
FIRED = [(True, "RMSNorm and 1x128 quantization in one op")]
WITH_SUM = [(True, "residual, RMSNorm and 1x128 quantization in one op")]


class Model(nn.Module):
    """``body(x, weight, linear)``, or of two activations."""

    def __init__(self, body: Any, k: int = K) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.randn(k).bfloat16())
        self.linear = nn.Parameter(torch.randn(16, k).bfloat16() / 16)

    def forward(self, *activations: Tensor) -> Any:
        return self.body(*activations, self.w, self.linear)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, EPS)
