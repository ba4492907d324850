"""What the tests of lower_router_norm build their graphs from."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PASS = "lower_router_norm"
K, EPS = 64, 1e-6
NORM = (True, "RMSNorm before a router in one op")
SUM = (True, "residual and RMSNorm before a router in one op")
MIXTURE = (True, "attention residuals and RMSNorm before a router in one op")


class Layer(nn.Module):
    """``body(self, *activations)`` with what a layer of experts has."""

    def __init__(self, body: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.randn(K).to(dtype))
        self.router = nn.Parameter(torch.randn(8, K).bfloat16())
        self.up = nn.Parameter((torch.randn(K, K) / 8).to(dtype))
        self.key = nn.Parameter(torch.randn(K).to(dtype))
        self.query = nn.Parameter(torch.randn(1, K).to(dtype) / 4)

    def forward(self, *activations: Tensor) -> Any:
        return self.body(self, *activations)

    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.w, EPS)

    def llama_norm(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return self.w * wide.to(x.dtype)

    def route(self, y: Tensor) -> Tensor:
        """By the op itself, whose bits do not change; two readers as a mixture of experts has."""
        logits: Tensor = torch.ops.compile_ext.router_gemm(y, self.router, None)
        return logits

    def experts(self, y: Tensor) -> Tensor:
        return F.silu(F.linear(y, self.up))


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()
